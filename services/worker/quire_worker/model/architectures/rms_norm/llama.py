"""Llama 1 to 3, and families with the same architecture."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import refuse_windows
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Llama model: RMS norms before blocks, RoPE and a gated MLP, the same in all layers. Flags of
    the config say which linear layers have biases. Raises Unsupported if the config asks for sliding windows."""
    refuse_windows(config)
    sizes, bias = read_sizes(config), config.flag("attention_bias", False)
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(attention, read_dense(config, sizes, bias=config.flag("mlp_bias", False)))
    return sizes.arch_spec(architecture, (layer,) * sizes.layers, tied_embeddings=is_tied(config))


LLAMA = Family(
    ("LlamaForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "llama",
    gguf=(
        GgufMap("llama", present=BIASES, interleaved=True),
        # llama.cpp computes these as Llamas too; transformers does not have them.
        GgufMap("internlm2", present=BIASES, interleaved=True),
        GgufMap("exaone", present=BIASES),
    ),
    models="Llama 1 to 3, Yi, SmolLM 1 and 2, Solar, TinyLlama; as GGUF files InternLM 2, EXAONE 3",
)
