"""MPT: ALiBi, norms without biases, fused query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.alibi import alibi_slopes
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an MPT model: ALiBi, no biases, a plain MLP, optionally clipped queries, keys and values, and
    by default a tied output head. The MLP is `expansion_ratio` times as wide as the model, by default 4. Options of
    attention come from the section `attn_config`. Raises Unsupported for values that no published model has, such as
    biases or fewer KV heads."""
    hidden = config.integer("hidden_size")
    sizes = read_sizes(
        config, inner=config.integer("expansion_ratio", 4) * hidden, eps="layer_norm_epsilon", default_eps=1e-5
    )
    if not config.flag("no_bias", True):
        raise refused(config, "no_bias", "biases")
    config.note_read("logit_scale")
    if config.has("logit_scale"):
        raise refused(config, "logit_scale", "scaled logits")
    options = config.section("attn_config") or ConfigFile({}, config.source)
    if options.text("attn_type", "multihead_attention") != "multihead_attention":
        raise refused(options, "attn_type", "fewer KV heads")
    if not options.flag("alibi", True):
        raise refused(options, "alibi", "learned positions")
    for key in ("prefix_lm", "qk_ln"):
        if options.flag(key, False):
            raise refused(options, key, "other attention")
    attention = sizes.attention(
        rope=None,
        alibi=alibi_slopes(sizes.heads, options.number("alibi_bias_max", 8.0)),
        qkv_clip=options.number("clip_qkv") if options.has("clip_qkv") else 0.0,
        scale=options.number("softmax_scale") if options.has("softmax_scale") else 0.0,
    )
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer"),
        tied_embeddings=is_tied(config, default=True),
    )


def _attention_section(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Make the attention section from the fields of a GGUF file. Without `alibi_bias_max`, the model has no ALiBi."""
    own = {key: fields[key] for key in ("alibi_bias_max", "clip_qkv") if key in fields}
    return dict.fromkeys(own) | {"attn_config": {"alibi": "alibi_bias_max" in own} | own}


MPT = Family(
    ("MptForCausalLM", "MPTForCausalLM"),
    build_spec,
    tensor_names(
        {"embed": "transformer.wte", "final_norm": "transformer.norm_f", "head": "lm_head"},
        "transformer.blocks.{layer}",
        {
            "attention_norm": "norm_1",
            "mlp_norm": "norm_2",
            "o": "attn.out_proj",
            "up": "ffn.up_proj",
            "down": "ffn.down_proj",
        }
        | dict.fromkeys("qkv", "attn.Wqkv"),
    ),
    "mpt",
    renamed={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
    defaults={"hidden_act": "gelu"},
    gguf=(
        GgufMap(
            "mpt",
            keys={"attention.max_alibi_bias": "alibi_bias_max", "attention.clamp_kqv": "clip_qkv"},
            eps="layer_norm_epsilon",
            derive=_attention_section,
            has_rope=False,
        ),
    ),
    models="MPT 7B and 30B",
)
