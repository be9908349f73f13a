"""AFMoE of dense layers alone: a gate on attention's output, norms before and after blocks. Layers without a window
have no rotary embedding."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, QkNormSpec
from quire_worker.model.architectures.common import MOST_LAYERS, is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, layer_types, windows_of
from quire_worker.model.config_check import refused
from quire_worker.model.config_file import ConfigFile

_DENSE = "num_dense_layers"


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a dense AFMoE model: a gate on attention's output, norms of heads, and norms before and after
    blocks. Layers with full attention, by default every fourth, have no RoPE; the others have a window. With
    `mup_enabled`, embeddings are multiplied by sqrt(hidden size). Raises Unsupported if a layer has experts."""
    if not is_dense(config):
        raise refused(config, _DENSE, "a mixture of experts in the layers from that one on")
    sizes, bias = read_sizes(config, head_dim=128, default_eps=1e-5), config.flag("attention_bias", False)
    every = "global_attn_every_n_layers"
    # Dense layers do not use the experts that the config describes.
    config.note_read("num_experts", "sliding_window", every)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % config.integer(every, 4) else FULL)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes)
    layers = tuple(
        LayerSpec(
            sizes.attention(
                rope=rope if kind == SLIDING else None,
                window=window,
                qk_norm=QkNormSpec(),
                qkv_bias=bias,
                o_bias=bias,
                output_gate=True,
            ),
            mlp,
            post_norm=True,
        )
        for kind, window in zip(types, windows_of(config, types), strict=True)
    )
    scale = sizes.hidden_size**0.5 if config.flag("mup_enabled", False, null=False) else 1.0
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config), embedding_scale=scale)


def is_dense(config: ConfigFile) -> bool:
    """Whether no layer has experts. The layers from `num_dense_layers` on have them."""
    return config.integer(_DENSE, 1, minimum=0) >= config.integer("num_hidden_layers", maximum=MOST_LAYERS)


AFMOE = Family(
    ("AfmoeForCausalLM",),
    build_spec,
    usual_names(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        output_gate="self_attn.gate_proj",
    ),
    "afmoe",
    defaults={"sliding_window": 1024},
    covers=is_dense,
    models="AFMoE without experts. Trinity has experts: it runs in the Transformers backend",
)
