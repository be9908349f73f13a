"""Tool calls between special tokens, with a separator token, as DeepSeek and Kimi write them. The separator stands
between name and arguments, or, in a `fenced` format, before a line with the name and a fenced block with the
arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.call_grammar import CallGrammar, any_of, list_of
from quire_tokenizer.output_parsing.marker_finder import begins_one
from quire_tokenizer.output_parsing.parts import MAX_NAME_CHARS
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_tokenizer.output_parsing.call_grammar import GrammarWriter, ToolFunction, WantedCalls
    from quire_tokenizer.output_parsing.parts import PartWriter

_FENCE = "```"
# What precedes the arguments behind the line with the name: white space, and a line with a fence or else a bracket.
# The group is all of this but the fence's line break.
_ARGUMENTS_BEGIN = re.compile(r"(\s*(?:```(?:json)?[ \t]*(?=\n)|(?=[{\[])))\n?")
# A text that more text may complete to _ARGUMENTS_BEGIN.
_ARGUMENTS_MAY_BEGIN = re.compile(r"\s*(?:`{0,2}|```(?:j|js|jso|(?:json)?[ \t]*))")


@dataclass(frozen=True, slots=True)
class SpecialTokenFormat:
    """Markers of a family. `separator` stands between a call's header and its arguments. `name`: a pattern that finds
    the name in the header. `fenced`: the name is the first line after the separator, and a block of code has the
    arguments."""

    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str
    name: re.Pattern[str]
    fenced: bool = False
    header: tuple[str, str, str] = ("", "", "")
    """The header around a call's name: a text before the name, a text behind it, and an expression."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return frozenset({self.section_begin, self.section_end, self.call_begin, self.separator, self.call_end})

    def write_calls(self, writer: GrammarWriter, wanted: WantedCalls) -> CallGrammar:
        """Write the grammar of a section of calls between its markers; it has one call unless several are wanted."""
        call = any_of(writer, [self._call(writer, tool) for tool in wanted.tools])
        calls = list_of(writer, call, "\n" if self.fenced else "", parallel=wanted.parallel)
        return CallGrammar(self.section_begin, f"{calls} {writer.literal(self.section_end)}")

    def _call(self, writer: GrammarWriter, tool: ToolFunction) -> str:
        """Return the expression of a call of this tool: its header, the separator, and arguments by its schema. If
        `fenced`, the name and a block of code with the arguments follow the separator."""
        arguments = writer.add_schema(tool.parameters)
        if self.fenced:
            head = f"{self.call_begin}function{self.separator}{tool.name}\n```json\n"
            closing = writer.literal(f"\n{_FENCE}{self.call_end}")
            return f"{writer.literal(head)} {arguments} {closing}"
        before, behind, more = self.header
        head = f"{writer.literal(f'{self.call_begin}{before}{tool.name}{behind}')} {more}"
        return f"{head} {writer.literal(self.separator)} {arguments} {writer.literal(self.call_end)}"


class SpecialTokenToolParser:
    """Parses content, and calls in a section between two markers."""

    __slots__ = (
        "_arguments",
        "_content",
        "_format",
        "_header",
        "_in_content",
        "_raw",
        "_tail",
        "_writer",
        "_written",
        "parse_text",
    )
    thinking = False

    def __init__(self, call_format: SpecialTokenFormat, writer: PartWriter) -> None:
        self._format = call_format
        self._writer = writer
        self._content = TrimmedWriter(writer.write_content, strip_start=False)
        self._arguments = TrimmedWriter(writer.write_arguments)
        self._in_content = self._content.write
        self.parse_text: Callable[[str], None] = self._in_content
        self._header = self._raw = self._tail = ""
        self._written = False

    def parse_marker(self, marker: str) -> None:
        """Begin or end a section or a call. A call may begin anywhere, and ends the call before it. The separator ends
        a call's header; then the arguments begin if the header has a name (see `_begin_call`), or the line with the
        name if `fenced`. A marker in another place is text."""
        call_format = self._format
        if marker == call_format.call_begin:
            self._end_call()
            self._header, self._raw, self.parse_text = "", marker, self._in_header
        elif marker == call_format.separator and self.parse_text == self._in_header:
            self._raw += marker
            if call_format.fenced:
                self.parse_text = self._in_first_line
            else:
                self._begin_call()
        elif marker in (call_format.call_end, call_format.section_end) and self.parse_text != self._in_content:
            self._end_call()
            self.parse_text = self._in_section if marker == call_format.call_end else self._in_content
        elif marker == call_format.section_begin and self.parse_text == self._in_content:
            self.parse_text = self._in_section
        else:
            self.parse_text(marker)

    def end(self, cut: str = "") -> None:
        """End the answer: end a call in progress, and write the white space that was held back. The beginning of a
        marker is dropped between calls, and in arguments if the marker ends them; elsewhere it is text."""
        call_format, state, markers = self._format, self.parse_text, frozenset[str]()
        if state == self._in_arguments:
            markers = frozenset({call_format.call_begin, call_format.call_end, call_format.section_end})
        elif state == self._in_section or (state == self._in_content and self._content.drops_space):
            markers = call_format.markers
        if cut and not begins_one(cut, markers):
            self.parse_text(cut)
        self._end_call()
        self._content.release()

    def _in_section(self, text: str) -> None:
        """Read a piece of text between calls, or after a call outside a section. White space is skipped, also before
        other text. Any other text ends the section; this text and the text after it are content, until another call or
        section begins."""
        text = text.lstrip()
        if text:
            self._content.write(text)
            self.parse_text = self._in_content

    def _in_header(self, text: str) -> None:
        """Add a piece of text to the header of a call. If the header gets longer than MAX_NAME_CHARS, NO_CALL_FOUND is
        noted. Then the text of the call is content, and so is the text that follows, until another call or section
        begins."""
        self._header += text
        self._raw += text
        if len(self._header) > MAX_NAME_CHARS:
            self._end_call()
            self.parse_text = self._in_content

    def _in_first_line(self, text: str) -> None:
        """Add a new piece of text to what precedes the arguments of a call: the line with the name, then the line that
        opens the block of code, which may be missing. Behind this line, or from a bracket on, the text is the call's
        arguments.

        If both lines and the white space around them have more than MAX_NAME_CHARS characters, if any other text
        follows the line with the name, or if the name is not valid, NO_CALL_FOUND is noted. Then the text of the call
        is content, with its markers, and so is the text that follows, until another call or section begins.
        """
        self._raw += text
        self._tail += text
        name, newline, rest = self._tail.partition("\n")
        begin = _ARGUMENTS_BEGIN.match(rest)
        # Text before the arguments, without the last character of a fence. So pieces give up where the whole does.
        before = begin.end(1) if begin else len(rest)
        too_long = len(name) + len(newline) + before > MAX_NAME_CHARS
        if too_long or not (begin or _ARGUMENTS_MAY_BEGIN.fullmatch(rest)):
            self._end_call()
            self.parse_text = self._in_content
            return
        if begin is None:
            return
        self._header = name
        self._tail = ""
        if self._begin_call():
            self._in_arguments(rest[begin.end() :])

    def _in_arguments(self, text: str) -> None:
        """Write a piece of the arguments, without the white space around them. If `fenced`, hold back backticks, spaces
        and line breaks at the end, which may close the block of code."""
        if not text:
            return
        if not self._format.fenced:
            self._write(text)
            return
        text = self._tail + text
        kept = text.rstrip("` \n")
        self._tail = text[len(kept) :]
        if kept:
            self._write(kept)

    def _write(self, text: str) -> None:
        self._written = self._written or not text.isspace()
        self._arguments.write(text)

    def _begin_call(self) -> bool:
        """Begin the call that the header names, and return True. Called when the arguments begin. If the header has no
        name, add NO_CALL_FOUND to the writer's failures, write the call's text so far as content, and return False; the
        text that follows is content too, until another call or section begins."""
        found = self._format.name.fullmatch(self._header.strip())
        if found is None:
            self._writer.note_no_call()
            self._content.write(self._raw)
            self._raw, self.parse_text = "", self._in_content
            return False
        self._content.drop()
        self._writer.write_call(found["name"])
        self._raw, self._written, self.parse_text = "", False, self._in_arguments
        return True

    def _end_call(self) -> None:
        """End the call in progress, if there is one, without the fence behind its arguments. Missing arguments become
        `{}`. If its arguments have not begun, its text becomes content, and NO_CALL_FOUND is added to the writer's
        failures. After this, text is read as between calls."""
        if self.parse_text == self._in_arguments:
            tail, self._tail = self._tail, ""
            rest = tail.rstrip().removesuffix(_FENCE).rstrip()
            if rest:
                self._write(rest)
            if not self._written:
                self._writer.write_arguments("{}")
        elif self._raw:
            self._writer.note_no_call()
            self._content.write(self._raw)
        self._arguments.drop()
        self._raw = self._tail = ""
        self.parse_text = self._in_section
