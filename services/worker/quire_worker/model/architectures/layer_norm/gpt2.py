"""GPT-2: learned positions, fused and transposed weight matrices."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, PositionSpec
from quire_worker.model.architectures.common import (
    GPT_BUFFERS,
    GPT_FIELDS,
    is_tied,
    read_dense,
    read_sizes,
    tensor_names,
)
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a GPT-2 model: learned positions, biases everywhere but in the output head, a plain MLP, by
    default a tied output head. If `n_inner` is null or absent, the MLP is four times as wide as the model. If
    `scale_attn_weights` is false, scores are not scaled."""
    sizes = read_sizes(config, inner=4 * config.integer("hidden_size"), eps="layer_norm_epsilon", default_eps=1e-5)
    scaled = config.flag("scale_attn_weights", True)
    attention = sizes.attention(rope=None, qkv_bias=True, o_bias=True, scale=0.0 if scaled else 1.0)
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=True))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config, default=True),
        positions=PositionSpec(sizes.max_positions),
    )


GPT2 = Family(
    ("GPT2LMHeadModel",),
    build_spec,
    tensor_names(
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        "transformer.h.{layer}",
        {"attention_norm": "ln_1", "mlp_norm": "ln_2", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
        | dict.fromkeys("qkv", "attn.c_attn"),
    ),
    "gpt2",
    renamed=GPT_FIELDS,
    defaults={"hidden_act": "gelu_new"},
    ignored=GPT_BUFFERS,
    transposed=frozenset(f"{part}.weight" for part in ("q", "k", "v", "o", "up", "down")),
    prefix="transformer.",
    gguf=(GgufMap("gpt2", eps="layer_norm_epsilon", has_rope=False),),
    models="GPT-2, DistilGPT2",
)
