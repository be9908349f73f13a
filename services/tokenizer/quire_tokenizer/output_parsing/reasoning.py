"""Parses reasoning between two markers. Another parser parses the rest of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from quire_tokenizer.output_parsing.parts import OutputParser, PartWriter


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around reasoning. `implied_ends`: other markers that also end reasoning, such as the start of tool
    calls."""

    start: str
    end: str
    implied_ends: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        """All these markers."""
        return self.implied_ends | {self.start, self.end}


class PlainContent:
    """Writes all text as content, markers included."""

    __slots__ = ("_writer",)
    thinking = False

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer

    def parse_text(self, text: str) -> None:
        self._writer.write_content(text)

    def parse_marker(self, marker: str) -> None:
        self._writer.write_content(marker)

    def end(self, cut: str = "") -> None:
        self._writer.write_content(cut)


class ReasoningParser:
    """Writes reasoning; `inner` parses the rest. `thinking`: whether the answer begins within reasoning."""

    __slots__ = ("_begun", "_inner", "_markers", "_plain", "_reasoning", "_trims", "thinking")

    def __init__(self, markers: ReasoningMarkers, inner: OutputParser, writer: PartWriter, *, thinking: bool) -> None:
        self._markers = markers
        self._inner = inner
        self._reasoning = TrimmedWriter(writer.write_reasoning)
        self.thinking = thinking
        # Whether the answer has text other than white space. After such text, a start marker is ordinary text.
        self._begun = False
        # Whether the inner parser gets the rest of the answer.
        self._plain = False
        # Whether to skip white space after reasoning.
        self._trims = False

    def parse_text(self, text: str) -> None:
        """Write text within reasoning as reasoning. Other text goes to the inner parser, without the white space after
        the reasoning. The first of it that is not white space ends the search for reasoning."""
        if self._plain:
            self._inner.parse_text(text)
            return
        if self.thinking:
            self._reasoning.write(text)
            self._begun = self._begun or not text.isspace()
            return
        if self._trims or not self._begun:
            if text.isspace():
                if not self._trims:
                    self._inner.parse_text(text)
                return
            text = text.lstrip() if self._trims else text
            self._trims, self._begun = False, True
        self._plain = True
        self._inner.parse_text(text)

    def parse_marker(self, marker: str) -> None:
        """Begin reasoning at a start marker, if nothing but white space came before. Within reasoning, see
        `_marker_while_thinking`. Any other marker goes to the inner parser, as the rest of the answer does."""
        if self.thinking:
            self._marker_while_thinking(marker)
        elif marker == self._markers.start and not self._begun:
            self.thinking = True
        else:
            self._begun = self._plain = True
            self._trims = False
            self._inner.parse_marker(marker)

    def end(self, cut: str = "") -> None:
        """End the answer. Within reasoning, a marker that is cut off is reasoning; else the inner parser gets it."""
        if self.thinking:
            self._reasoning.write(cut)
            cut = ""
        self._reasoning.drop()
        self._inner.end(cut)

    def _marker_while_thinking(self, marker: str) -> None:
        """End reasoning at an end marker, and drop the white space before it; an implied end marker goes to the inner
        parser too. Other markers are part of the reasoning, but a start marker before the first text other than white
        space is dropped."""
        if marker == self._markers.end or marker in self._markers.implied_ends:
            self.thinking = False
            self._reasoning.drop()
            self._begun = self._trims = True
            if marker != self._markers.end:
                self._inner.parse_marker(marker)
        elif marker != self._markers.start or self._begun:
            self._reasoning.write(marker)
            self._begun = True
