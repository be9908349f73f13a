"""OPT: learned positions; the first two rows of their table are unused."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, PositionSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, tensor_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_OFFSET = 2


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an OPT model: learned positions whose table begins two rows later, layer norms with the epsilon
    1e-5, and a plain MLP; by default the layers' linear layers have biases, and the output head, which has none, is
    tied. Raises Unsupported for norms after blocks and for an embedding of another width, as OPT 350M has, for norms
    without weights, and for a missing last norm."""
    sizes = read_sizes(config, default_eps=1e-5)
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not config.flag(key, True):
            raise refused(config, key, "other norms")
    if config.flag("_remove_final_layer_norm", False):
        raise refused(config, "_remove_final_layer_norm", "no last norm")
    if config.integer("word_embed_proj_dim", sizes.hidden_size, nullable=True) != sizes.hidden_size:
        raise refused(config, "word_embed_proj_dim", "an embedding of another width")
    bias = config.flag("enable_bias", True)
    attention = sizes.attention(rope=None, qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(attention, read_dense(config, sizes, gated=False, bias=bias))
    return sizes.arch_spec(
        architecture,
        (layer,) * sizes.layers,
        norm=NormSpec(1e-5, "layer", bias=True),
        tied_embeddings=is_tied(config, default=True),
        positions=PositionSpec(sizes.max_positions + _OFFSET, _OFFSET),
    )


OPT = Family(
    ("OPTForCausalLM",),
    build_spec,
    tensor_names(
        {
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "final_norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        "model.decoder.layers.{layer}",
        {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm", "up": "fc1", "down": "fc2"}
        | {part: f"self_attn.{part}_proj" for part in "qkv"}
        | {"o": "self_attn.out_proj"},
    ),
    "opt",
    renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    defaults={"hidden_act": "relu"},
    prefix="model.",
    models="OPT 125M, 1.3B to 66B",
)
