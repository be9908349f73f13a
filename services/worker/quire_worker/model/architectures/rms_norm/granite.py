"""Granite 3, dense: a Llama with multipliers."""

from __future__ import annotations

from dataclasses import replace

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Granite 3 model: a Llama with multipliers of scores, embeddings, residuals and logits. The
    residual stream is kept divided by the residual multiplier, so this needs no operation. The norms' epsilon is
    divided by its square. Absent multipliers are 1, so without `attention_multiplier` scores are not scaled.

    Raises ConfigError unless the residual multiplier is above 1e-6 and below 1e6.
    """
    sizes, bias = read_sizes(config), config.flag("attention_bias", False)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        scale=config.number("attention_multiplier", 1.0),
    )
    layer = LayerSpec(attention, read_dense(config, sizes, bias=config.flag("mlp_bias", False)))
    residual = config.number("residual_multiplier", 1.0)
    if not 1e-6 < residual < 1e6:
        raise config.bad("residual_multiplier", "a number from 0.000001 to 1000000")
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps / residual**2),
        tied_embeddings=is_tied(config),
        embedding_scale=config.number("embedding_multiplier", 1.0) / residual,
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


_GGUF = GgufMap(
    "granite",
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    present=BIASES,
    # Without a scale, llama.cpp takes that of the heads.
    derive=lambda fields: {"attention_multiplier": fields.get("attention_multiplier", fields["head_dim"] ** -0.5)},
    interleaved=True,
)
GRANITE = Family(
    ("GraniteForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "granite",
    # llama.cpp computes MiniCPM as a Granite; transformers does not have it. In old files, scales without a key are
    # not 1, but what llama.cpp knows them to be.
    gguf=(
        _GGUF,
        replace(_GGUF, architecture="minicpm", required=("embedding_scale", "residual_scale", "logit_scale")),
    ),
    models="Granite 3.0 to 3.3, 2B and 8B; as GGUF files MiniCPM",
)
