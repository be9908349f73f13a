"""Persimmon: squared ReLU, layer norms on query and key heads, half of each head rotates."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, QkNormSpec
from quire_worker.model.architectures.common import LAYER_EPS, is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Persimmon model: biases everywhere but in the output head, a plain MLP, and RoPE. `config`
    has the family's defaults already (see `Family.adapt`): squared ReLU, and rotation of half of each head. Query and
    key heads get layer norms unless `qk_layernorm` is false."""
    sizes = read_sizes(config, eps=LAYER_EPS, default_eps=1e-5)
    normed = config.flag("qk_layernorm", True)
    attention = sizes.attention(
        rope=read_rope(config, sizes.head_dim),
        qk_norm=QkNormSpec(kind="layer", bias=True) if normed else None,
        qkv_bias=True,
        o_bias=True,
    )
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=True))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config),
    )


PERSIMMON = Family(
    ("PersimmonForCausalLM",),
    build_spec,
    tensor_names(
        {"embed": "model.embed_tokens", "final_norm": "model.final_layernorm", "head": "lm_head"},
        "model.layers.{layer}",
        {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "o": "self_attn.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
        | dict.fromkeys("qkv", "self_attn.query_key_value"),
    ),
    "persimmon",
    defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    by_head=True,
    models="Persimmon 8B",
)
