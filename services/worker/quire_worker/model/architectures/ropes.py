"""Reads the rotary position embedding of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Final

from quire_common.errors import ConfigError, Unsupported
from quire_worker.model.arch_spec import RopeSpec
from quire_worker.model.config_check import refused
from quire_worker.model.config_facts import CONTEXT
from quire_worker.model.config_file import ConfigFile
from quire_worker.model.rope import SUPPORTED_ROPE_KINDS

ORIGINAL: Final = "original_max_position_embeddings"
# Keys of a RoPE section that each kind reads.
_ANY: Final = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KEYS: Final = {
    "default": _ANY,
    "linear": _ANY | {"factor"},
    "factors": _ANY | {"factors"},
    "llama3": _ANY | {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": _ANY
    | {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", ORIGINAL},
    "longrope": _ANY | {"factor", "short_factor", "long_factor", "attention_factor", ORIGINAL},
}
_LEAST_BETA, _MOST_BETA = 1e-3, 1e6
# Names of old config.json files.
_OLD_NAMES: Final = {"su": "longrope"}


def read_rope(
    config: ConfigFile, head_dim: int, *, layer_type: str = "", interleaved: bool = False, theta: float = 10000.0
) -> RopeSpec:
    """Read the RoPE from `rope_parameters` (new files) or from `rope_theta` and `rope_scaling` (old files). If the
    section has a RoPE for each type of layer, `layer_type` selects one. `interleaved`: neighbouring dimensions rotate
    together, not those half a head apart. `theta` is the base if the file names none. `partial_rotary_factor`, of the
    section or else of the config, is the share of a head that rotates; it must give an even number of dimensions.
    Raises Unsupported for an unknown variant, unknown keys or settings that contradict each other, and ConfigError for
    wrong values."""
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    section = config.section(name) or ConfigFile({}, config.source)
    if layer_type and isinstance(section.fields.get(layer_type), dict):
        section = section.section(layer_type) or section
    kind = section.text("rope_type", section.text("type", "default", nullable=True))
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in SUPPORTED_ROPE_KINDS:
        raise Unsupported(
            "UNSUPPORTED_ROPE",
            f"RoPE variant {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_KINDS)}.",
            "Serve a model with a supported variant.",
        )
    check_rope_keys(config, section, name, kind, KEYS[kind])
    theta = read_base(config, section, theta)
    config.note_read("partial_rotary_factor")
    partial = section if section.has("partial_rotary_factor") else config
    part = partial.number("partial_rotary_factor", 1.0, nullable=True)
    rotated = int(head_dim * min(part, 2.0))
    if rotated > head_dim or rotated < 2 or rotated % 2:
        raise config.bad("partial_rotary_factor", f"a share of the {head_dim} dimensions of a head that is even")
    plain = RopeSpec(theta=theta, rotated=0 if rotated == head_dim else rotated, interleaved=interleaved)
    return _check_factors(config, _READERS[kind](config, section, plain), head_dim)


def read_base(config: ConfigFile, section: ConfigFile, default: float) -> float:
    """Read the base of a RoPE's frequencies: `rope_theta` of the section, else of the config, else `default`."""
    config.note_read("rope_theta")
    return (
        section.number("rope_theta")
        if section.has("rope_theta")
        else config.number("rope_theta", default, nullable=True)
    )


def _default(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    return plain


def _with(plain: RopeSpec, kind: str, **fields: object) -> RopeSpec:
    values = {name: getattr(plain, name) for name in ("theta", "rotated", "interleaved")}
    return RopeSpec(**(values | {"kind": kind} | fields))


def _linear(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    return _with(plain, "linear", factor=section.number("factor"))


def _factors(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    return _with(plain, "factors", factors=section.numbers("factors"))


def _llama3(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    """Read a RoPE of the kind llama3. The original context is the model's context if absent. Raises ConfigError unless
    high_freq_factor is above low_freq_factor."""
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise ConfigError(
            "BAD_CONFIG",
            f"{section.source}: high_freq_factor ({high}) is not above low_freq_factor ({low}).",
            "Use the config.json of the model's own revision.",
        )
    return _with(
        plain,
        "llama3",
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=section.positions(ORIGINAL, config.positions(CONTEXT)),
    )


def _yarn(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    """Read a RoPE of the kind yarn. An absent attention factor follows from `factor` and, if both are given, the two
    `mscale` numbers. Raises ConfigError unless beta_fast is above beta_slow and both are within bounds, and for a base
    of at most 1."""
    factor = section.number("factor")
    fast, slow = (
        section.number(name, usual, nullable=True) for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if not _LEAST_BETA <= slow < fast <= _MOST_BETA:
        raise section.bad("beta_fast", f"more than beta_slow ({slow:g}), both from {_LEAST_BETA:g} to {_MOST_BETA:g}")
    if plain.theta <= 1.0:
        raise section.bad("rope_theta", "a number above 1")
    scale, scale_all = (
        section.number(name, 0.0) if section.has(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    wanted = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all) if scale and scale_all else _yarn_scale(factor)
    return _with(
        plain,
        "yarn",
        factor=factor,
        original_max_positions=section.positions(ORIGINAL, config.positions(CONTEXT)),
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.flag("truncate", True, null=False),
        attention_factor=section.number("attention_factor", wanted, nullable=True),
    )


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(config: ConfigFile, section: ConfigFile, plain: RopeSpec) -> RopeSpec:
    """Read a RoPE of the kind longrope, with factors for short and for long contexts. The original context comes from
    the config, else from the section, else it is the model's context. An absent `factor` is context / original context.
    An absent attention factor is sqrt(1 + log(factor) / log(original context)), or 1 if the factor is at most 1. Raises
    ConfigError for an original context below 2."""
    context = config.positions(CONTEXT)
    original = (config if ORIGINAL in config.fields else section).positions(ORIGINAL, context)
    config.note_read(ORIGINAL)
    if original < 2:
        raise config.bad(ORIGINAL, "at least 2")
    factor = section.number("factor", context / original, nullable=True)
    wanted = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _with(
        plain,
        "longrope",
        original_max_positions=original,
        factors=section.numbers("short_factor"),
        long_factors=section.numbers("long_factor"),
        attention_factor=section.number("attention_factor", wanted, nullable=True),
    )


_READERS: Final[dict[str, Callable[[ConfigFile, ConfigFile, RopeSpec], RopeSpec]]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def check_rope_keys(config: ConfigFile, section: ConfigFile, name: str, kind: str, keys: Collection[str]) -> None:
    """Raise Unsupported for a key of the section that is not one of this kind's `keys`. Also refuse different values of
    one setting: `type` and `rope_type`, two bases, or `rope_parameters` and `rope_scaling`. `name` is the section's
    name."""
    for key, value in section.fields.items():
        if value is not None and key not in keys:
            raise refused(section, key, f"more than the RoPE variant {kind!r} has")
    if section.has("type") and _OLD_NAMES.get(section.text("type"), section.text("type")) != kind:
        raise refused(section, "type", f"another RoPE variant than `rope_type` ({kind!r})")
    base = section.number("rope_theta") if section.has("rope_theta") else 0.0
    if base and config.number("rope_theta", base, nullable=True) != base:
        raise refused(config, "rope_theta", f"another base than the one in `{name}`")
    if name == "rope_parameters" and config.has("rope_scaling"):
        old = config.section("rope_scaling")
        if old is not None and any(section.fields.get(key) != value for key, value in old.fields.items()):
            raise refused(config, "rope_scaling", "another RoPE variant than `rope_parameters`")


def _check_factors(config: ConfigFile, rope: RopeSpec, head_dim: int) -> RopeSpec:
    """Return the RoPE as it is. Raises ConfigError unless each of its lists of factors has one factor for each pair of
    rotated dimensions."""
    wanted = (rope.rotated or head_dim) // 2
    lists = {"factors": (rope.factors,), "longrope": (rope.factors, rope.long_factors)}
    for factors in lists.get(rope.kind, ()):
        if len(factors) != wanted:
            raise ConfigError(
                "BAD_CONFIG",
                f"{config.source}: RoPE has {len(factors)} factors for {wanted} pairs of rotated dimensions.",
                "Use the config.json of the model's own revision.",
            )
    return rope
