"""OpenAI's harmony format of gpt-oss: messages with a channel each, for reasoning, text and tool calls."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.call_grammar import CallGrammar, any_of
from quire_tokenizer.output_parsing.marker_finder import begins_one
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_tokenizer.output_parsing.call_grammar import GrammarWriter, WantedCalls
    from quire_tokenizer.output_parsing.parts import PartWriter

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = frozenset({"<|end|>", "<|return|>", "<|call|>"})
MARKERS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN}) | ENDS
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def write_calls(writer: GrammarWriter, wanted: WantedCalls) -> CallGrammar:
    """Write the grammar of one call: a message in the commentary channel to one of the tools, with JSON of the tool's
    schema. The call's end ends the answer too, so that there is no second."""
    heads = (
        f"{writer.literal(f'{tool.name} {CONSTRAIN}json{MESSAGE}')} {writer.add_schema(tool.parameters)}"
        for tool in wanted.tools
    )
    return CallGrammar(f"{CHANNEL}commentary to=functions.", any_of(writer, heads))


class HarmonyParser:
    """Parses messages. The prompt ends with `<|start|>assistant`, so an answer begins with the rest of a header."""

    __slots__ = ("_before", "_calls", "_header", "_in_call", "_marked", "_reasoned", "_write", "_writer", "thinking")

    def __init__(self, writer: PartWriter, *, calls: bool) -> None:
        """`calls`: whether the request has tools; if not, a message that calls a tool is read as any other: as
        reasoning in the channel `analysis`, else as content."""
        self._writer = writer
        self._calls = calls
        self._header = ""
        self._write: Callable[[str], None] | None = None
        self._reasoned = self._in_call = False
        self._before = True  # no message has begun
        self._marked = False  # the header has a marker, or a start marker stands before it
        self.thinking = False

    def parse_text(self, text: str) -> None:
        """Append text to the message, or to the header if no message has begun."""
        if self._write is not None:
            self._write(text)
        else:
            self._header += text

    def parse_marker(self, marker: str) -> None:
        """Begin a message after its header, or end the message or the header at an end marker or the next start. Any
        other marker belongs to the header, or is text within a message."""
        if self._write is None and marker == MESSAGE:
            self._begin()
        elif self._write is None and marker not in ENDS and marker != START:
            self._header += marker
            self._marked = True
        elif marker in ENDS or marker == START:
            self._end_message()
            self._marked = marker == START
        else:
            self.parse_text(marker)

    def end(self, cut: str = "") -> None:
        """End the answer, and its message or header (see `_end_message`). The beginning of a marker is dropped in a
        header that is no content, and in arguments if the marker ends them; elsewhere it is text."""
        if cut and not (self._in_call and begins_one(cut, ENDS | {START})):
            self.parse_text(cut)
        self._end_message()

    def _begin(self) -> None:
        """Begin the message that the header describes: a tool call if it names a recipient and calls are wanted,
        reasoning if its channel is `analysis`, else content. A line break separates reasoning from earlier
        reasoning."""
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        self._header, self._before = "", False
        if recipient is not None and self._calls:
            self._in_call = True
            self._writer.write_call(recipient[1])
            self._write = TrimmedWriter(self._writer.write_arguments).write
        elif channel is not None and channel[1] == "analysis":
            self.thinking = True
            if self._reasoned:
                self._writer.write_reasoning("\n")
            self._reasoned = True
            self._write = TrimmedWriter(self._writer.write_reasoning).write
        else:
            self._write = self._writer.write_content

    def _end_message(self) -> None:
        """End the message or the header. A header without a message is content if it has no marker, no start marker
        stands before it and no message has begun; any other is dropped. If calls are wanted, a header of a call that
        has no message adds NO_CALL_FOUND to the writer's failures."""
        if self._calls and _RECIPIENT.search(self._header):
            self._writer.note_no_call()
        if self._before and not self._marked:
            self._writer.write_content(self._header)
        self._write, self._header, self.thinking, self._in_call = None, "", False, False
