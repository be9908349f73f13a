"""Finds markers that are ordinary text, because the vocabulary has no token for them. A marker may span several
tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from quire_tokenizer.output_parsing.parts import OutputParser


class TextMarkers:
    """The markers, compiled once per model. No marker may contain another."""

    __slots__ = ("_ending", "all", "beginnings", "first", "longest", "pattern", "shortest")

    def __init__(self, markers: Collection[str]) -> None:
        self.all = frozenset(markers)
        self.pattern = re.compile("|".join(map(re.escape, sorted(markers))) if markers else r"(?!)")
        self.first = frozenset(marker[0] for marker in markers)
        self.longest = max(map(len, markers), default=0)
        self.beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
        self.shortest = min(map(len, markers), default=0)
        beginnings = "|".join(_beginning_of(marker) for marker in sorted(markers) if len(marker) > 1)
        self._ending = re.compile(rf"(?:{beginnings})\Z" if beginnings else r"(?!)")

    def held(self, text: str) -> int:
        """Return how many characters at the text's end may begin a marker."""
        found = self._ending.search(text, max(0, len(text) - self.longest + 1))
        return len(text) - found.start() if found else 0


class MarkerFinder:
    """Passes text and markers to a parser. Holds back text that may be the beginning of a marker."""

    __slots__ = ("_first", "_held", "_markers", "_parser")

    def __init__(self, markers: TextMarkers, parser: OutputParser) -> None:
        self._markers = markers
        self._first = markers.first
        self._parser = parser
        self._held = ""

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    def parse_text(self, text: str) -> None:
        """Pass text to the parser, and each marker in it as a marker. The end of the text is held back while it may
        begin a marker."""
        if not self._held and self._first.isdisjoint(text):
            self._parser.parse_text(text)
            return
        text, at = self._held + text, 0
        # Most tokens of a marker are only a part of it.
        if text in self._markers.beginnings:
            self._held = text
            return
        if text in self._markers.all:
            self._held = ""
            self._parser.parse_marker(text)
            return
        if len(text) > self._markers.shortest:
            for match in self._markers.pattern.finditer(text):
                if match.start() > at:
                    self._parser.parse_text(text[at : match.start()])
                self._parser.parse_marker(match.group())
                at = match.end()
            text = text[at:]
        end = len(text) - self._markers.held(text)
        self._held = text[end:]
        if end:
            self._parser.parse_text(text[:end])

    def parse_marker(self, marker: str) -> None:
        """Pass on a marker that is a token. Text before it that was held back is no marker."""
        held = self._take_held()
        if held:
            self._parser.parse_text(held)
        self._parser.parse_marker(marker)

    def end(self, cut: str = "") -> None:
        """End the answer. The text that is held back is the beginning of a marker that was cut off."""
        self._parser.end(self._take_held() + cut)

    def _take_held(self) -> str:
        """Return the text that was held back, and hold it no longer."""
        held, self._held = self._held, ""
        return held


def begins_one(text: str, markers: Iterable[str]) -> bool:
    """Whether a marker begins with the text."""
    return any(marker.startswith(text) for marker in markers)


def _beginning_of(marker: str) -> str:
    """Return an expression that matches each beginning of a marker, but not the whole marker."""
    expression = ""
    for character in reversed(marker[:-1]):
        expression = f"{re.escape(character)}(?:{expression})?" if expression else re.escape(character)
    return expression
