"""Seed-OSS: biases on query, key and value, a head size of its own."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Seed-OSS model: a Llama with 128 dimensions per head by default, and by default biases of
    query, key and value. Flags of the config say which linear layers have biases. Raises ConfigError for a missing or
    invalid value of the config, and Unsupported for a RoPE or an activation that Quire lacks."""
    sizes = read_sizes(config, head_dim=128)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim),
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
    )
    layer = LayerSpec(attention, read_dense(config, sizes, bias=config.flag("mlp_bias", False)))
    return sizes.arch_spec(architecture, (layer,) * sizes.layers, tied_embeddings=is_tied(config))


SEED_OSS = Family(
    ("SeedOssForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "seed_oss",
    gguf=(
        GgufMap(
            "seed_oss",
            present=BIASES | {"attention_out_bias": "o.bias"},
            parts={"mlp_norm": ("post_attention_norm",)},
        ),
    ),
    models="Seed-OSS 36B",
)
