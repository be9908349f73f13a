"""GPT-J: attention beside the MLP; RoPE over neighbouring dimensions of a part of each head."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, RopeSpec
from quire_worker.model.architectures.common import (
    GPT_BUFFERS,
    GPT_FIELDS,
    is_tied,
    read_dense,
    read_sizes,
    tensor_names,
)
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a GPT-J model: attention and MLP in parallel after one shared norm, RoPE over neighbours, and
    biases of the MLP and the output head, but not of attention. The MLP is by default four times as wide as the model.
    `rotary_dim` is the number of dimensions that rotate, by default 64; ConfigError if it is odd or larger than a
    head."""
    sizes = read_sizes(config, inner=4 * config.integer("hidden_size"), eps="layer_norm_epsilon", default_eps=1e-5)
    rotated = config.integer("rotary_dim", 64)
    if rotated > sizes.head_dim or rotated % 2:
        raise config.bad("rotary_dim", f"an even number of a head's {sizes.head_dim} dimensions")
    rope = RopeSpec(rotated=rotated % sizes.head_dim, interleaved=True)
    mlp = read_dense(config, sizes, gated=False, bias=True)
    layer = LayerSpec(sizes.attention(rope=rope), mlp, parallel=True, shared_norm=True)
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(sizes.norm_eps, "layer", bias=True),
        tied_embeddings=is_tied(config),
        head_bias=True,
    )


GPTJ = Family(
    ("GPTJForCausalLM",),
    build_spec,
    tensor_names(
        {"embed": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{layer}",
        {"attention_norm": "ln_1", "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}
        | {part: f"attn.{part}_proj" for part in "qkv"},
    ),
    "gptj",
    renamed=GPT_FIELDS,
    defaults={"hidden_act": "gelu_new"},
    ignored=GPT_BUFFERS,
    models="GPT-J 6B",
)
