"""BLOOM: ALiBi, a norm after the embedding, and a fused linear layer for query, key and value, head by head."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.alibi import alibi_slopes
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a BLOOM model: ALiBi in place of RoPE, biases everywhere but in the output head, a plain MLP
    that is by default four times as wide as the model, a norm after the embedding, and by default a tied output head.
    The context is that of the training, although ALiBi does not limit it. Raises Unsupported if residuals come after
    the norms."""
    hidden = config.integer("hidden_size")
    sizes = read_sizes(config, inner=4 * hidden, eps="layer_norm_epsilon", default_eps=1e-5)
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise refused(config, "apply_residual_connection_post_layernorm", "other residuals")
    attention = sizes.attention(rope=None, alibi=alibi_slopes(sizes.heads), qkv_bias=True, o_bias=True)
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=True))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config, default=True),
        embedding_norm=True,
    )


BLOOM = Family(
    ("BloomForCausalLM",),
    build_spec,
    tensor_names(
        {
            "embed": "transformer.word_embeddings",
            "embedding_norm": "transformer.word_embeddings_layernorm",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        "transformer.h.{layer}",
        {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "o": "self_attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
        | dict.fromkeys("qkv", "self_attention.query_key_value"),
    ),
    "bloom",
    renamed={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
    },
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 2048},
    says={"attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "bias_dropout_fusion": True},
    by_head=True,
    prefix="transformer.",
    gguf=(GgufMap("bloom", eps="layer_norm_epsilon", has_rope=False),),
    models="BLOOM, BLOOMZ",
)
