"""The key-value pairs of a GGUF file, read by type: a value that is absent or of another kind is a typed error.

Knows names and types; knows nothing of what a value means to a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire_common.errors import ConfigError
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

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self.values.get(key)
        if not isinstance(value, TextArray):
            raise self.bad(key, "a list of texts")
        try:
            return list(value)
        except UnicodeDecodeError as error:
            raise self.bad(key, "a list of texts in UTF-8") from error

    def numbers(self, key: str) -> NDArray[np.generic]:
        """A list of numbers, of the file's own type."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            raise self.bad(key, "a list of numbers")
        return value

    def bad(self, key: str, wanted: str) -> ConfigError:
        """The error for a key that is absent or not what is wanted."""
        found = f"{self.path} lacks `{key}` ({wanted})."
        if key in self.values:
            found = f"{self.path}: `{key}` is {_shown(self.values[key])}, not {wanted}."
        return ConfigError(
            "BAD_GGUF_METADATA",
            found,
            "Download the file again, or convert the model with a current llama.cpp.",
        )


def _shown(value: Value) -> str:
    if isinstance(value, TextArray | np.ndarray):
        return f"a list of {len(value)}"
    return repr(value)[:80]
