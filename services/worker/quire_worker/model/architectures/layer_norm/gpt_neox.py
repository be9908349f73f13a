"""GPT-NeoX and Pythia: a fused linear layer for query, key and value, head by head; a part of each head rotates."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec
from quire_worker.model.architectures.common import LAYER_EPS, is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a GPT-NeoX model from its config: layer norms with biases, an MLP of two linear layers with
    biases, and RoPE on the share `partial_rotary_factor` of each head. `config` has the family's defaults already (see
    `Family.adapt`), here a quarter. Attention has biases unless `attention_bias` is false. In a layer, attention and
    MLP each normalise the layer's input, and the layer adds both results to its input. If `use_parallel_residual` is
    false, the MLP comes after the attention instead. `architecture` is the class name that the config gives. Raises
    ConfigError for a bad field, and Unsupported for a RoPE or an activation that Quire lacks."""
    sizes, bias = read_sizes(config, eps=LAYER_EPS, default_eps=1e-5), config.flag("attention_bias", True)
    attention = sizes.attention(rope=read_rope(config, sizes.head_dim), qkv_bias=bias, o_bias=bias)
    mlp = read_dense(config, sizes, gated=False, bias=True)
    layer = LayerSpec(attention, mlp, parallel=config.flag("use_parallel_residual", True))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config),
    )


GPT_NEOX = Family(
    ("GPTNeoXForCausalLM",),
    build_spec,
    tensor_names(
        {"embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers.{layer}",
        {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "o": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
        | dict.fromkeys("qkv", "attention.query_key_value"),
    ),
    "gpt_neox",
    renamed={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    defaults={"hidden_act": "gelu", "partial_rotary_factor": 0.25},
    ignored=(".attention.bias", ".attention.masked_bias"),
    by_head=True,
    gguf=(
        GgufMap(
            "gptneox",
            keys={"use_parallel_residual": "use_parallel_residual"},
            eps=LAYER_EPS,
            says={"use_parallel_residual": False},
            present={"attention_bias": "q.bias"},
            rotates_part=True,
        ),
    ),
    models="GPT-NeoX 20B, Pythia, Dolly 2",
)
