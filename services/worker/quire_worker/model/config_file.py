"""Reads the JSON files of a model folder, with typed errors for absent fields and fields of the wrong type.

This module knows JSON and the names of fields, and nothing of what a field means to a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from quire_common.columns import MAX_I32
from quire_common.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20
_MOST_POSITIONS = 2**63 - 1


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most 16 MiB. Raises ConfigError if the file cannot be read, is larger, is
    not JSON, or holds no object."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= MAX_CONFIG_BYTES else b""
    except OSError as error:
        raise ConfigError(
            "UNREADABLE_FILE", f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(
            "BAD_CONFIG", f"{path} has {size} bytes; the most is {MAX_CONFIG_BYTES}.", "Use a real model folder."
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError("BAD_CONFIG", f"{path} is not JSON: {error}.", "Download the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError("BAD_CONFIG", f"{path} holds no JSON object.", "Download the file again.")
    return value


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The fields of one config.json. `has` and `section` treat a null as an absent field. The readers of values do so
    too, unless `flag` is told what null means, or `refuses_null` is set."""

    fields: Mapping[str, Any]
    source: str = "config.json"
    keys: Mapping[str, str] = field(default_factory=dict)
    """Field -> its name in the file, where that is another."""
    seen: set[str] = field(default_factory=set, compare=False, repr=False)
    """Fields whose values were read."""
    refuses_null: bool = False
    """Null is an error where a caller does not say what it means: another value than the default may be meant."""
    defaulted: frozenset[str] = frozenset()
    """Fields that have a default of the family, which null does not mean."""

    def overridden(self, fields: Mapping[str, Any]) -> Self:
        """Return the same config with these fields in place of its own. A null has the same meaning as in the file, and
        an object replaces the whole field. Errors say that the option --hf-overrides counts too."""
        if not fields:
            return self
        return replace(self, fields={**self.fields, **fields}, source=f"{self.source} with --hf-overrides")

    def adapted(self, renamed: Mapping[str, str], defaults: Mapping[str, Any]) -> Self:
        """Return the same config with fields renamed to the usual names (`renamed`: own name -> usual name); errors
        still show the own names. If the file has a field under both names, the later value counts, but a null does not
        replace a value. `defaults` (by usual name) fill in only fields that the file lacks. For a field with such a
        default, a null in the file stays, and readers of values refuse it even where they take null otherwise. For
        other fields, they refuse nulls whose meaning they do not know. In the new config, no field counts as read
        yet."""
        fields: dict[str, Any] = {}
        for name, value in self.fields.items():
            usual = renamed.get(name, name)
            if value is not None or fields.get(usual) is None:
                fields[usual] = value
        keys = {**{usual: own for own, usual in renamed.items()}, **self.keys}
        return replace(
            self,
            fields={**defaults, **fields},
            keys=keys,
            seen=set(),
            refuses_null=True,
            defaulted=frozenset(defaults),
        )

    def note_read(self, *names: str) -> None:
        """Note that fields were considered, whatever their values."""
        self.seen.update(names)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.fields.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is present and null."""
        return name in self.fields and self.fields[name] is None

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_I32,
        nullable: bool = False,
    ) -> int:
        """Read an integer from `minimum` to `maximum`, or `default` if the field is absent; note it as read. Null means
        the default if `nullable` (except in `defaulted` fields), or if the config does not refuse nulls. Raises
        ConfigError for another value, and for an absent field without a default."""
        value = self._value(name, default, nullable)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.bad(name, f"an integer from {minimum} to {maximum}")
        return value

    def positions(self, name: str, default: int | None = None) -> int:
        """Read a number of positions. It may exceed int32, since some models claim to have no bound."""
        return self.integer(name, default, maximum=_MOST_POSITIONS)

    def number(self, name: str, default: float | None = None, *, nullable: bool = False) -> float:
        """Read a finite number above 0 as a float, or `default` if the field is absent; note it as read. Null means the
        default if `nullable` (except in `defaulted` fields), or if the config does not refuse nulls. Raises ConfigError
        for another value, and for an absent field without a default."""
        value = self._value(name, default, nullable)
        # Not isfinite: an integer may be more than a float holds.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.bad(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool, *, null: bool | None = None) -> bool:
        """Return a field that is true or false, or `default` if it is absent; note it as read. A null means `null` if
        this is given (except in `defaulted` fields). Otherwise it means the default, or is an error in a config that
        refuses nulls. Raises ConfigError for any other value."""
        said = default if null is None or not self.is_null(name) else null
        value = self._value(name, said, null is not None)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None, *, nullable: bool = False) -> str:
        """Read a string, or `default` if the field is absent; note it as read. Null means the default if `nullable`
        (except in `defaulted` fields), or if the config does not refuse nulls. Raises ConfigError for another value,
        and for an absent field without a default."""
        value = self._value(name, default, nullable)
        if not isinstance(value, str):
            raise self.bad(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings; empty if absent, or if null (except in `defaulted` fields). Raises ConfigError for
        any other value."""
        value = self._value(name, [], True)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(name, "a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Read a list of integers from 0 to the largest int32; empty if absent, or if null (except in `defaulted`
        fields). Raises ConfigError for any other value."""
        value = self._value(name, [], True)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_I32 for item in value
        ):
            raise self.bad(name, "a list of integers that are not negative")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Read a list of finite numbers above 0; empty if absent, or if null (except in `defaulted` fields). Raises
        ConfigError for any other value."""
        value = self._value(name, [], True)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item <= sys.float_info.max
            for item in value
        ):
            raise self.bad(name, "a list of numbers above 0")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read a token id or a list of token ids as a tuple; empty if absent, or if null (except in `defaulted`
        fields). The ids may be outside the vocabulary. Raises ConfigError for any other value."""
        value = self._value(name, [], True)
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_I32 for item in items):
            raise self.bad(name, f"a token id from 0 to {MAX_I32}, or a list of such ids")
        return tuple(items)

    def section(self, name: str) -> ConfigFile | None:
        """Read a nested object as a config of its own, and note the field as read; None if it is absent or null. Raises
        ConfigError if it is no object."""
        self.seen.add(name)
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(name, "an object")
        return ConfigFile(value, f"{self.source}: {name}", refuses_null=self.refuses_null)

    def bad(self, name: str, wanted: str, *, fix: str = "") -> ConfigError:
        """Make the ConfigError for a field that is absent or has a wrong value; the caller raises it. `wanted`
        describes right values. `fix`: the fix that the error names, if it is not to correct the model's own file."""
        fix = fix or "Use the config.json of the model's own revision."
        key = self.keys.get(name, name)
        if name not in self.fields:
            return ConfigError("BAD_CONFIG", f"{self.source} lacks `{key}` ({wanted}).", fix)
        shown = "null" if self.is_null(name) else repr(self.fields[name])[:80]
        return ConfigError("BAD_CONFIG", f"{self.source}: `{key}` is {shown}, not {wanted}.", fix)

    def _value(self, name: str, default: object, nullable: bool) -> object:
        """Return the field's value and note it as read. An absent field gives `default`. A null gives `default` too, if
        the config does not refuse nulls, or if `nullable` and the field is not in `defaulted`; else None."""
        self.seen.add(name)
        value = self.fields.get(name)
        nullable = (nullable and name not in self.defaulted) or not self.refuses_null or name not in self.fields
        return default if value is None and nullable else value
