"""Arcee's AFM: a Llama with squared ReLU and an MLP of two matrices."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an AFM model: a Llama whose MLP is plain. `config` has the family's defaults already (see
    `Family.adapt`): squared ReLU. Flags of the config say which linear layers have biases."""
    sizes, bias = read_sizes(config, default_eps=1e-5), config.flag("attention_bias", False)
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=config.flag("mlp_bias", False)))
    return sizes.arch_spec(architecture, (layer,) * sizes.layers, tied_embeddings=is_tied(config))


ARCEE = Family(
    ("ArceeForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "arcee",
    defaults={"hidden_act": "relu2"},
    gguf=(GgufMap("arcee", present=BIASES, interleaved=True),),
    models="AFM 4.5B",
)
