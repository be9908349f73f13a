"""A decoder that also parses the text: it removes the markers, and assigns each character to a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.marker_finder import MarkerFinder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_tokenizer.detokenize.incremental_decoder import TextDecoder
    from quire_tokenizer.output_parsing.marker_finder import TextMarkers
    from quire_tokenizer.output_parsing.parts import OutputParser, Part, PartWriter


class ParsedDecoder:
    """A TextDecoder. `markers`: the markers that are tokens, by id; the wrapped decoder must show them. `text_markers`:
    the other markers."""

    __slots__ = ("_decoder", "_inner", "_markers", "_parser", "_writer", "parsers", "reasoning_tokens")

    def __init__(
        self,
        decoder: TextDecoder,
        parser: OutputParser,
        writer: PartWriter,
        markers: Mapping[int, str],
        text_markers: TextMarkers,
        parsers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._decoder = decoder
        self._inner = parser
        self._parser: OutputParser = MarkerFinder(text_markers, parser) if text_markers.longest else parser
        self._writer = writer
        self._markers = markers
        self.parsers = parsers
        """Kind and name of each parser of this answer."""
        self.reasoning_tokens = 0
        """Number of reasoning tokens so far, without the markers around them."""

    def feed(self, token_id: int) -> str:
        """Decode and parse a token. Returns the text that the parser has written meanwhile; the parser may hold text
        back, and leaves out markers, except those that it takes for text. A token counts as a reasoning token if the
        answer is within reasoning before and after it."""
        text = self._decoder.feed(token_id)
        marker = self._markers.get(token_id) if self._markers else None
        inner = self._inner
        thinking = inner.thinking
        if marker is None:
            if text:
                self._parser.parse_text(text)
        else:
            # The decoder also returns an incomplete character before the marker.
            at = text.rfind(marker)
            if at > 0:
                self._parser.parse_text(text[:at])
            self._parser.parse_marker(marker)
        if thinking and inner.thinking:
            self.reasoning_tokens += 1
        return self._writer.take_text()

    def flush(self) -> str:
        """End the answer. Returns the rest of its text, which the decoder and the parser held back, and checks the
        arguments of the last call for `failures`."""
        text = self._decoder.flush()
        if text:
            self._parser.parse_text(text)
        self._parser.end()
        self._writer.end_calls()
        return self._writer.take_text()

    @property
    def failures(self) -> list[str]:
        """Return the faults of the calls of this answer."""
        return self._writer.failures

    def take_parts(self, chars: int) -> list[Part]:
        """Return the parts of the next `chars` characters of the text."""
        return self._writer.take_parts(chars)
