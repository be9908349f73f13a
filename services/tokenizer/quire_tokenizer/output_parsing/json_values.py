"""Finds the end of a JSON value in text that comes in pieces, in linear time and without parsing the value."""

from __future__ import annotations

import re

WHITESPACE = " \t\n\r"
_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,\]}\s]")


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
        """Scan from `at`, after the first character. Return the index after the value's end, or -1 if it goes on."""
        if self._depth < 0:
            found = _SCALAR_END.search(text, at)
            return found.start() if found else -1
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._string else _IN_CONTAINER).search(text, at)
            if found is None:
                return -1
            at = found.end()
            character = found.group()
            if character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = not self._string
            else:
                self._depth += 1 if character in "[{" else -1
            if not self._string and not self._depth:
                return at
        return -1
