"""Reads which layers of a config.json have sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

from quire_common.errors import Unsupported
from quire_worker.model.config_check import refused
from quire_worker.model.config_facts import CONTEXT
from quire_worker.model.config_file import ConfigFile

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_DEFAULT: Final = MappingProxyType({"sliding_window": 4096})
"""`Family.defaults` of families that have a window unless config.json says null."""
# The first layer with a window in Qwen2 and Qwen3, if config.json does not say.
_FIRST_WINDOW: Final = 28


def layer_types(config: ConfigFile, layers: int, default: Callable[[int], str] | None = None) -> tuple[str, ...]:
    """Return the type of each layer, full or sliding attention: from the config's `layer_types` or, if that is absent
    or empty, `default(index)` for each layer index. The tuple is empty if neither is given. Raises Unsupported for
    another type, and ConfigError for a list of the wrong length."""
    types: Sequence[str] = config.texts("layer_types")
    if types and len(types) != layers:
        raise config.bad("layer_types", f"a list of {layers} kinds")
    if not types and default is not None:
        types = [default(layer) for layer in range(layers)]
    unknown = set(types) - {SLIDING, FULL}
    if unknown:
        raise Unsupported(
            "UNSUPPORTED_LAYER_TYPE",
            f"Layer types {', '.join(sorted(unknown))} are not supported; full and sliding attention are.",
            "Serve a model with supported layers.",
            param="layer_types",
        )
    return tuple(types)


def windows_of(config: ConfigFile, types: Sequence[str]) -> tuple[int, ...]:
    """Return the window of each layer by its type: `sliding_window` for sliding attention, 0 for full attention. Raises
    ConfigError if a layer needs the field and it is absent or null."""
    return tuple(config.integer("sliding_window") if each == SLIDING else 0 for each in types)


def every_layer(config: ConfigFile, layers: int) -> tuple[int, ...]:
    """Return the window of each layer, which is the same in all: `sliding_window`, or 0 if it is absent or null or
    covers the context."""
    config.note_read("sliding_window")
    if not config.has("sliding_window") or config.positions("sliding_window") >= config.positions(CONTEXT):
        return (0,) * layers
    return (config.integer("sliding_window"),) * layers


def switched_windows(config: ConfigFile, layers: int, default: Callable[[int], str] | None = None) -> tuple[int, ...]:
    """Return the window of each layer; all 0 if `use_sliding_window` is off, or the window covers the context, or it is
    null and `layer_types` names no sliding layer. The layers with a window are named by `layer_types` or, if that is
    absent, by `default(index)`, which returns a layer's type. Without both, they are the layers from
    `max_window_layers` on (28 if absent). Raises Unsupported if the config has a window shorter than the context and no
    `use_sliding_window`, or names sliding layers while it is off. Raises ConfigError if it is on and the window is
    absent, or is null where a layer needs it."""
    types = layer_types(config, layers)
    config.note_read("sliding_window", "max_window_layers")
    wanted = config.has("sliding_window") and config.positions("sliding_window") < config.positions(CONTEXT)
    if wanted and not config.has("use_sliding_window"):
        # Some engines apply such a window and some do not.
        raise refused(config, "sliding_window", "a sliding window or none, as `use_sliding_window` is absent: add it")
    if not config.flag("use_sliding_window", False):
        if SLIDING in types:
            raise refused(config, "layer_types", "sliding windows, where `use_sliding_window` does not")
        return (0,) * layers
    if "sliding_window" not in config.fields:
        raise config.bad("sliding_window", "the number of positions of a window, as `use_sliding_window` is true")
    if not wanted and (config.has("sliding_window") or SLIDING not in types):
        return (0,) * layers
    if not types:
        first = config.integer("max_window_layers", _FIRST_WINDOW, minimum=0)
        default = default or (lambda layer: SLIDING if layer >= first else FULL)
        types = tuple(default(layer) for layer in range(layers))
    return windows_of(config, types)


def refuse_windows(config: ConfigFile) -> None:
    """Raise Unsupported if config.json asks for sliding windows, for a family that has none. `layer_types` with a
    sliding layer is refused in any case; a `sliding_window` that covers the context, or is switched off, is accepted.
    Raises the errors of `layer_types` too."""
    config.note_read("sliding_window", "max_window_layers", "use_sliding_window")
    if SLIDING in layer_types(config, config.integer("num_hidden_layers")):
        raise refused(config, "layer_types", "sliding windows")
    asked = config.has("sliding_window") and config.flag("use_sliding_window", True, null=True)
    if asked and config.positions("sliding_window") < config.positions(CONTEXT):
        raise refused(config, "sliding_window", "sliding windows")
