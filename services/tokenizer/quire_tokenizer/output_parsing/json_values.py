"""Finds the end of a JSON value in text that comes in pieces, in linear time and without parsing the value."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import NamedTuple

WHITESPACE = " \t\n\r"
# The functions of `json` make a new decoder or encoder for each value, unless all options are the default ones.
DECODER = json.JSONDecoder(strict=False)
"""Reads JSON whose strings may contain control characters."""
ENCODER = json.JSONEncoder(ensure_ascii=False)
"""Writes JSON with the characters as they are."""
_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,\]}\s]")


_MAX_CACHED_CHARS = 16


class _Effect(NamedTuple):
    """The effect of a text on a scanner: how much deeper the scanner gets, how deep at least on the way, and how the
    text ends."""

    deeper: int
    least: int
    in_string: bool
    escaped: bool


@lru_cache(maxsize=1 << 14)
def _effect_of(text: str, in_string: bool) -> _Effect:
    """Return the effect of a text on a scanner: its change of depth, the least depth on the way, and whether it ends
    within a string or after a backslash. Texts of tokens come again and again, so their effects are cached."""
    depth = least = 0
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == '"':
            in_string = not in_string
        elif in_string:
            escaped = character == "\\"
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
            least = min(least, depth)
    return _Effect(depth, least, in_string, escaped)


class ValueScanner:
    """Scans one value. The constructor takes the first character; `feed` returns where the value ends."""

    __slots__ = ("_depth", "_escaped", "_string", "is_string")

    def __init__(self, first: str) -> None:
        self.is_string = first == '"'
        self._string = self.is_string
        self._escaped = False
        # Open lists and objects; -1: a number, true, false or null.
        self._depth = 1 if first in "[{" else 0 if self.is_string else -1

    @property
    def in_string(self) -> bool:
        """Whether the next character is within a string."""
        return self._string

    def feed(self, text: str, at: int) -> int:
        """Scan from `at`, after the first character. Return the index after the value's end, or -1 if it goes on. A
        number or constant ends before a comma, a closing bracket or white space."""
        if self._depth < 0:
            found = _SCALAR_END.search(text, at)
            return found.start() if found else -1
        if self._string and not self._escaped and '"' not in text and "\\" not in text:
            return -1
        if not at and len(text) <= _MAX_CACHED_CHARS and self._depth and not self._escaped:
            deeper, least, in_string, escaped = _effect_of(text, self._string)
            if self._depth + least > 0:
                self._depth += deeper
                self._string, self._escaped = in_string, escaped
                return -1
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := (_IN_STRING if self._string else _IN_CONTAINER).search(text, at):
            at = found.end()
            character = found[0]
            if character == "\\":
                self._escaped = at == len(text)
                at += 1
                continue
            if character == '"':
                self._string = not self._string
            else:
                self._depth += 1 if character in "[{" else -1
            if not self._string and not self._depth:
                return at
        return -1


def decode_string(value: str) -> str | None:
    """Return the text of a JSON value that is a string; None for another value or invalid escapes."""
    if value[:1] != '"':
        return None
    if "\\" not in value:
        return value[1:-1]
    try:
        found = DECODER.decode(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
