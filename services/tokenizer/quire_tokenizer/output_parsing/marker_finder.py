"""Finds markers that are ordinary text, because the vocabulary has no token for them. A marker may span several
tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from quire_tokenizer.output_parsing.parts import OutputParser


class TextMarkers:
    """The markers, compiled once per model. No marker may be a prefix of another."""

    __slots__ = ("beginnings", "first", "longest", "pattern")

    def __init__(self, markers: Collection[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(markers))) if markers else r"(?!)")
        self.first = frozenset(marker[0] for marker in markers)
        self.longest = max(map(len, markers), default=0)
        self.beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))

    def held(self, text: str) -> int:
        """Return how many characters at the text's end may begin a marker."""
        start = max(0, len(text) - self.longest + 1)
        if not any(text.find(first, start) >= 0 for first in self.first):
            return 0
        return next((len(text) - at for at in range(start, len(text)) if text[at:] in self.beginnings), 0)


class MarkerFinder:
    """Passes text and markers to a parser. Holds back text that may be the beginning of a marker."""

    __slots__ = ("_held", "_markers", "_parser")

    def __init__(self, markers: TextMarkers, parser: OutputParser) -> None:
        self._markers = markers
        self._parser = parser
        self._held = ""

    def parse_text(self, text: str) -> None:
        if not self._held and self._markers.first.isdisjoint(text):
            self._parser.parse_text(text)
            return
        text, at = self._held + text, 0
        for match in self._markers.pattern.finditer(text):
            if match.start() > at:
                self._parser.parse_text(text[at : match.start()])
            self._parser.parse_marker(match.group())
            at = match.end()
        rest = text[at:]
        end = len(rest) - self._markers.held(rest)
        self._held = rest[end:]
        if end:
            self._parser.parse_text(rest[:end])

    def parse_marker(self, marker: str) -> None:
        """Pass on a marker that is a token."""
        self._release()
        self._parser.parse_marker(marker)

    def end(self) -> None:
        self._release()
        self._parser.end()

    def _release(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._parser.parse_text(held)
