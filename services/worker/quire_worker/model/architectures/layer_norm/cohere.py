"""Cohere's Command R and R7B: attention beside the MLP, RoPE over neighbouring dimensions, scaled logits."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, NormSpec, QkNormSpec
from quire_worker.model.architectures.common import LAYER_EPS, USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import WINDOWS, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, WINDOW_DEFAULT, layer_types, windows_of
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a Command R model: attention and a gated MLP in parallel after one shared layer norm, RoPE over
    neighbours, scaled logits, a tied head by default. Flags add biases of attention and norms of heads.

    In the second generation, layers with full attention have no RoPE, and the others have windows. By default every
    fourth layer has full attention (`sliding_window_pattern` replaces the four); `layer_types` takes precedence.
    """
    sizes, bias = read_sizes(config, eps=LAYER_EPS, default_eps=1e-5), config.flag("attention_bias", False)
    second = architecture == COHERE2.architectures[0]
    rope = read_rope(config, sizes.head_dim, interleaved=True, theta=10_000.0 if second else 500_000.0)
    types = (FULL,) * sizes.layers
    if second:
        pattern = config.integer("sliding_window_pattern", 4, nullable=True)
        types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    mlp = read_dense(config, sizes)
    normed = QkNormSpec("each_head", "layer") if config.flag("use_qk_norm", False, null=False) else None
    layers = tuple(
        LayerSpec(
            sizes.attention(
                rope=None if kind == FULL and second else rope,
                window=window,
                qk_norm=normed,
                qkv_bias=bias,
                o_bias=bias,
            ),
            mlp,
            parallel=True,
            shared_norm=True,
        )
        for kind, window in zip(types, windows_of(config, types), strict=True)
    )
    return sizes.arch_spec(
        architecture,
        layers,
        norm=NormSpec(sizes.norm_eps, "layer"),
        tied_embeddings=is_tied(config, default=True),
        logit_scale=config.number("logit_scale", 0.0625),
    )


COHERE = Family(
    ("CohereForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "cohere",
    gguf=(
        GgufMap(
            "command-r",
            keys={"logit_scale": "logit_scale"},
            nonzero=("logit_scale",),
            eps=LAYER_EPS,
            present={"attention_bias": "q.bias", "use_qk_norm": "q_norm.weight"},
        ),
    ),
    models="Command R, Command R+, Aya",
)
COHERE2 = Family(
    ("Cohere2ForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "cohere2",
    defaults=WINDOW_DEFAULT,
    gguf=(
        GgufMap(
            "cohere2",
            keys=WINDOWS | {"logit_scale": "logit_scale"},
            nonzero=("attention.sliding_window", "logit_scale"),
            eps=LAYER_EPS,
        ),
    ),
    models="Command R7B, Command A",
)
