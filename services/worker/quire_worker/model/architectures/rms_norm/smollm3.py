"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from quire_worker.model.arch_spec import ArchSpec, LayerSpec
from quire_worker.model.architectures.common import USUAL_NAMES, is_tied, read_dense, read_sizes
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import BIASES, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, switched_windows
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of a SmolLM3 model: a Llama in which some layers have no RoPE, by default every fourth
    (`no_rope_layer_interval`), and by default a tied head. `no_rope_layers` has a 1 for each layer with a rotary
    embedding. If windows are on, the other layers have them, unless `layer_types` says which do. Raises ConfigError if
    `no_rope_layers` is shorter than the number of layers."""
    sizes, bias = read_sizes(config), config.flag("attention_bias", False)
    rope = read_rope(config, sizes.head_dim, theta=2e6)
    mlp = read_dense(config, sizes, bias=config.flag("mlp_bias", False))
    interval = config.integer("no_rope_layer_interval", 4)
    rotates = config.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(sizes.layers)]
    if len(rotates) < sizes.layers:
        raise config.bad("no_rope_layers", f"a list of {sizes.layers} numbers")
    windows = switched_windows(config, sizes.layers, lambda layer: FULL if rotates[layer] else SLIDING)
    layers = tuple(
        LayerSpec(sizes.attention(rope=rope if rotated else None, qkv_bias=bias, o_bias=bias, window=window), mlp)
        for rotated, window in zip(rotates, windows, strict=False)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config, default=True))


SMOLLM3 = Family(
    ("SmolLM3ForCausalLM",),
    build_spec,
    USUAL_NAMES,
    "smollm3",
    # Each fourth layer has no rotary embedding; files do not say so.
    gguf=(GgufMap("smollm3", present=BIASES, interleaved=True),),
    models="SmolLM3 3B",
)
