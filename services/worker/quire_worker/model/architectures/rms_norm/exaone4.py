"""EXAONE 4: norms only after blocks. In models with windows, the layers without a window have no rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

from quire_worker.model.arch_spec import ArchSpec, LayerSpec, QkNormSpec
from quire_worker.model.architectures.common import is_tied, read_dense, read_sizes, usual_names
from quire_worker.model.architectures.family import Family
from quire_worker.model.architectures.gguf_map import WINDOWS, GgufMap
from quire_worker.model.architectures.ropes import read_rope
from quire_worker.model.architectures.windows import FULL, SLIDING, WINDOW_DEFAULT, layer_types, windows_of
from quire_worker.model.config_file import ConfigFile


def build_spec(architecture: str, config: ConfigFile) -> ArchSpec:
    """Build the spec of an EXAONE 4 model: norms of heads, and norms only after blocks. In models with windows, layers
    with full attention have no RoPE. `sliding_window` is 4096 if absent (see `Family.adapt`). If it is null, all layers
    have full attention and RoPE; ConfigError if `layer_types` names a layer with a window."""
    sizes = read_sizes(config, default_eps=1e-5)
    rope, mlp = read_rope(config, sizes.head_dim), read_dense(config, sizes)
    config.note_read("sliding_window", "sliding_window_pattern", "layer_types")
    has_windows = config.has("sliding_window")
    types = layer_types(config, sizes.layers, _every_nth_full(config) if has_windows else lambda _: FULL)
    layers = tuple(
        LayerSpec(
            sizes.attention(
                rope=None if kind == FULL and has_windows else rope,
                window=window,
                qk_norm=QkNormSpec(),
            ),
            mlp,
            pre_norm=False,
            post_norm=True,
        )
        for kind, window in zip(types, windows_of(config, types), strict=True)
    )
    return sizes.arch_spec(architecture, layers, tied_embeddings=is_tied(config))


def _every_nth_full(config: ConfigFile) -> Callable[[int], str]:
    """Return the function from a layer's index to its type: each n-th layer has full attention, the others a window. n
    is `sliding_window_pattern`; if that is a string of letters such as LLLG, n is its length. n is 4 if the field is
    absent or null."""
    key = "sliding_window_pattern"
    pattern = config.fields.get(key)
    every = max(1, len(pattern)) if isinstance(pattern, str) else config.integer(key, 4, nullable=True)
    return lambda layer: SLIDING if (layer + 1) % every else FULL


EXAONE4 = Family(
    ("Exaone4ForCausalLM",),
    build_spec,
    usual_names(
        attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm", mlp_norm="none"
    ),
    "exaone4",
    defaults=WINDOW_DEFAULT,
    # A file without a window has none, where config.json has the default.
    gguf=(GgufMap("exaone4", keys=WINDOWS, derive=lambda fields: {"sliding_window": fields.get("sliding_window")}),),
    models="EXAONE 4 1.2B and 32B",
)
