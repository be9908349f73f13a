"""The key-value pairs of a GGUF file, read by type: a value that is absent or of another kind is a typed error.

This module knows names and types, and nothing of what a value means to a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quire_common.errors import ConfigError
from quire_common.gguf.faults import CONVERT_AGAIN
from quire_common.gguf.text_array import TextArray

Value = bool | int | float | str | TextArray | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The pairs of one file. A method without a default raises ConfigError where the key is absent."""

    values: Mapping[str, Value]
    path: Path

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text under a key; `default`, if given, where the key is absent. Raises ConfigError if there is no
        such text."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return the integer under a key; `default`, if given, where the key is absent. Raises ConfigError for an
        absent key without a default, another type (true and false too), or a value (or default) below `minimum`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number under a key as a float; `default`, if given, where the key is absent. Raises
        ConfigError for an absent key without a default, for another type, and for infinity or NaN."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under a key; `default` where the key is absent. Raises ConfigError for a value of another
        type."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text_array(self, key: str) -> TextArray:
        """Return the list of texts under a key, whose texts are not decoded yet. Raises ConfigError if there is no such
        list."""
        value = self.values.get(key)
        if not isinstance(value, TextArray):
            raise self.bad(key, "a list of texts")
        return value

    def texts(self, key: str, indices: Iterable[int] | None = None) -> list[str]:
        """Return the list of texts under a key, or only those with the given indices, in the order of `indices`. Raises
        ConfigError if there is no such list, or a returned text is not UTF-8; IndexError for an index outside the
        list."""
        found = self.text_array(key)
        try:
            return list(found) if indices is None else [found[i] for i in indices]
        except UnicodeDecodeError as error:
            raise self.bad(key, "a list of texts in UTF-8") from error

    def numbers(self, key: str) -> NDArray[np.number]:
        """Return the list of numbers under a key, in the file's own dtype. Raises ConfigError if there is no such
        list."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.number):
            raise self.bad(key, "a list of numbers")
        return cast("NDArray[np.number]", value)

    def integers(self, key: str) -> NDArray[np.integer]:
        """Return the list of integers under a key, in the file's own dtype. Raises ConfigError if there is no such
        list."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
            raise self.bad(key, "a list of integers")
        return cast("NDArray[np.integer]", value)

    def flags(self, key: str) -> list[bool]:
        """Return the list of booleans under a key. Raises ConfigError if there is no such list."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise self.bad(key, "a list of true and false")
        found: list[bool] = value.tolist()
        return found

    def shown(self, key: str) -> str:
        """Return a key's value as text for an error message: a list's length and type, or the value's repr, cut to 80
        characters. Raises KeyError for an absent key."""
        value = self.values[key]
        if isinstance(value, TextArray):
            return f"a list of {len(value)} texts"
        if isinstance(value, np.ndarray):
            return f"a list of {len(value)} {value.dtype} values"
        return repr(value)[:80]

    def bad(self, key: str, wanted: str) -> ConfigError:
        """Return the error for a key that is absent, or whose value is not `wanted` (a noun that describes a good
        value)."""
        if key in self.values:
            return self.fault(f"`{key}` is {self.shown(key)}, not {wanted}")
        return self.fault(f"the file lacks `{key}` ({wanted})")

    def fault(self, cause: str) -> ConfigError:
        """The error for any other fault of the metadata. `cause` is a clause."""
        return ConfigError("BAD_GGUF_METADATA", f"{self.path}: {cause}.", CONVERT_AGAIN)
