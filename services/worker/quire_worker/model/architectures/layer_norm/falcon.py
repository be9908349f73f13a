"""Falcon 7B, 40B, RW and Falcon 2: fused query, key and value, attention beside the MLP, RoPE or ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.alibi import alibi_slopes
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Falcon model: RoPE or ALiBi, a plain MLP, a tied head by default, and biases of the layers'
    linear layers if configured; norms always have biases. Attention lies beside the MLP in new models and by default;
    then both share one norm unless the config gives them two, which is the default of new models. The MLP is by default
    four times as wide as the model.

    Old models have one KV head (`multi_query`) or as many as query heads; the config of newer models has the number.
    """
    hidden, heads, is_new = config.integer("hidden_size"), config.integer("num_attention_heads"), _is_new(config)
    shares_one = config.flag("multi_query", True, null=False)
    kv_heads = config.integer("num_kv_heads", heads, nullable=True) if is_new else 1 if shares_one else heads
    config.note_read("num_kv_heads")
    config = replace(config, fields={**config.fields, "num_key_value_heads": kv_heads})
    sizes = read_sizes(config, inner=4 * hidden, eps="layer_norm_epsilon", default_eps=1e-5)
    bias, alibi = config.flag("bias", False, null=False), config.flag("alibi", False, null=False)
    attention = sizes.attention(
        rope=None if alibi else read_rope(config, sizes.head_dim),
        # Scores are scaled with the slopes on them.
        alibi=tuple(slope * sizes.head_dim**-0.5 for slope in alibi_slopes(heads)) if alibi else (),
        qkv_bias=bias,
        o_bias=bias,
    )
    if alibi:
        config.note_read("rope_parameters", "rope_scaling", "rope_theta")
    parallel = is_new or config.flag("parallel_attn", True, null=False)
    config.note_read("parallel_attn")
    layer = LayerSpec(
        attention,
        read_dense(config, sizes, gated=False, bias=bias),
        parallel=parallel,
        shared_norm=parallel and not _has_two_norms(config),
    )
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config, default=True),
    )


def _is_new(config: ConfigFile) -> bool:
    return config.flag("new_decoder_architecture", False, null=False)


def _has_two_norms(config: ConfigFile) -> bool:
    """Whether attention and MLP of a parallel layer have their own norms."""
    return config.integer("num_ln_in_parallel_attn", 2 if _is_new(config) else 1, nullable=True) == 2


def _names(config: ConfigFile) -> Mapping[str, str]:
    """Return the names of a Falcon model's tensors by role. In new models with two norms, these are ln_attn and ln_mlp.
    Query, key and value are one tensor."""
    two = _is_new(config) and _has_two_norms(config)
    return tensor_names(
        {"embed": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{layer}",
        {
            "attention_norm": "ln_attn" if two else "input_layernorm",
            "mlp_norm": "ln_mlp" if two else "post_attention_layernorm",
            "o": "self_attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
        | dict.fromkeys("qkv", "self_attention.query_key_value"),
    )


FALCON = Family(
    ("FalconForCausalLM",),
    build_spec,
    _names(ConfigFile({})),
    "falcon",
    renamed={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
    },
    defaults={"hidden_act": "gelu", "max_position_embeddings": 2048},
    by_head=True,
    names_for=_names,
    gguf=(
        GgufMap(
            "falcon",
            eps="layer_norm_epsilon",
            says={"new_decoder_architecture": True},
            present={"bias": "q.bias", "two_norms": "second_norm.weight"},
            derive=lambda fields: {
                "num_kv_heads": fields["num_key_value_heads"],
                "num_ln_in_parallel_attn": 2 if fields["two_norms"] else 1,
            },
            # With two norms, the first in name is that of the MLP.
            parts={
                "attention_norm": ("attn_norm_2", "attn_norm"),
                "mlp_norm": ("attn_norm",),
                "second_norm": ("attn_norm_2",),
            },
            neutral={"tensor_data_layout": ("jploski",)},
        ),
    ),
    models="Falcon 7B, 40B and 180B, Falcon-RW, Falcon 2 11B",
)
