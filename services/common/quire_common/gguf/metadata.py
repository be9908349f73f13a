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
        """A text."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """An integer of at least `minimum`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text_array(self, key: str) -> TextArray:
        """A list of texts, not decoded yet."""
        value = self.values.get(key)
        if not isinstance(value, TextArray):
            raise self.bad(key, "a list of texts")
        return value

    def texts(self, key: str, indices: Iterable[int] | None = None) -> list[str]:
        """A list of texts, or those of its texts that have these indices."""
        found = self.text_array(key)
        try:
            return list(found) if indices is None else [found[i] for i in indices]
        except UnicodeDecodeError as error:
            raise self.bad(key, "a list of texts in UTF-8") from error

    def numbers(self, key: str) -> NDArray[np.number]:
        """A list of numbers, of the file's own type."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.number):
            raise self.bad(key, "a list of numbers")
        return cast("NDArray[np.number]", value)

    def integers(self, key: str) -> NDArray[np.integer]:
        """A list of integers, of the file's own type."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
            raise self.bad(key, "a list of integers")
        return cast("NDArray[np.integer]", value)

    def flags(self, key: str) -> list[bool]:
        """A list of true and false."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise self.bad(key, "a list of true and false")
        found: list[bool] = value.tolist()
        return found

    def shown(self, key: str) -> str:
        """The value of a key for an error message, cut to a line."""
        value = self.values[key]
        if isinstance(value, TextArray):
            return f"a list of {len(value)} texts"
        if isinstance(value, np.ndarray):
            return f"a list of {len(value)} {value.dtype} values"
        return repr(value)[:80]

    def bad(self, key: str, wanted: str) -> ConfigError:
        """The error for a key that is absent or not what is wanted, which is a noun."""
        if key in self.values:
            return self.fault(f"`{key}` is {self.shown(key)}, not {wanted}")
        return self.fault(f"the file lacks `{key}` ({wanted})")

    def fault(self, cause: str) -> ConfigError:
        """The error for any other fault of the metadata. `cause` is a clause."""
        return ConfigError("BAD_GGUF_METADATA", f"{self.path}: {cause}.", CONVERT_AGAIN)
