"""OLMo 1: norms without weights, clipped queries, keys and values."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import LAYER_KEY, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an OLMo 1 model: layer norms without weights, RoPE, a gated MLP, clipped queries, keys and
    values if `clip_qkv` is set, and biases of attention if `attention_bias` is. The epsilon of the norms is always
    1e-5, since the config has none."""
    sizes, bias = read_sizes(config, default_eps=1e-5), config.flag("attention_bias", False)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        qkv_clip=config.number("clip_qkv") if config.has("clip_qkv") else 0.0,
    )
    layer = LayerSpec(attention, read_dense(config, sizes))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(1e-5, "layer", weight=False),
        tied_embeddings=is_tied(config),
    )


OLMO = Family(
    ("OlmoForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "olmo",
    gguf=(
        GgufMap(
            "olmo",
            keys={"attention.clamp_kqv": "clip_qkv"},
            eps="",
            present={"attention_bias": "q.bias"},
            neutral={LAYER_KEY: (1e-5,)},
            interleaved=True,
        ),
    ),
    models="OLMo 1B and 7B",
)
