"""Qwen3, dense: norms on query and key heads, a head size of its own."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, QkNormSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import switched_windows
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Qwen3 model: a Llama with norms of query and key heads. A head has 128 dimensions if the file
    has no `head_dim`. Layers have windows only if `use_sliding_window` is on. Raises ConfigError for a missing or
    invalid value of the config, and Unsupported for a RoPE, an activation or windows that Quire lacks."""
    sizes, bias = read_sizes(config, head_dim=128), config.flag("attention_bias", False)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes)
    layers = tuple(
        LayerSpec(sizes.attention(rope=rope, qk_norm=QkNormSpec(), qkv_bias=bias, o_bias=bias, window=window), mlp)
        for window in switched_windows(config, sizes.layers)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


QWEN3 = Family(
    ("Qwen3ForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "qwen3",
    says={"use_qk_norm": True},
    gguf=(GgufMap("qwen3"),),
    models="Qwen3 0.6B to 32B",
)
