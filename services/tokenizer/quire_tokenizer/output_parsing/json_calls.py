"""Tool calls that are JSON objects with a name and arguments, alone or in a list.

Text that turns out not to be a call becomes content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.call_grammar import CallGrammar, any_of, list_of
from quire_tokenizer.output_parsing.json_objects import JsonCall
from quire_tokenizer.output_parsing.json_values import WHITESPACE
from quire_tokenizer.output_parsing.marker_finder import begins_one
from quire_tokenizer.output_parsing.parts import MAX_NAME_CHARS
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from quire_tokenizer.output_parsing.call_grammar import GrammarWriter, WantedCalls
    from quire_tokenizer.output_parsing.parts import PartWriter

_SEPARATORS = WHITESPACE + "[],;"
_LIST_END = re.compile(rf"[{WHITESPACE}]*\]")


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """A family's form of calls. `begins`: markers before a call; `ends`: markers after it. `bare`: an answer that
    is only a call needs no marker, but the name must be one of the request's tools."""

    begins: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    bare: bool = False
    named: bool = False
    """A call may also be a name with arguments after it: `name{...}` or `name[ARGS]{...}`."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        return self.begins | self.ends | (frozenset({"[ARGS]", "[CALL_ID]"}) if self.named else frozenset())

    def write_calls(self, writer: GrammarWriter, wanted: WantedCalls) -> CallGrammar:
        """Write the grammar of calls, one or more as wanted. `bare` calls are objects without markers. If the
        vocabulary has [ARGS], `named` calls are names with arguments. Otherwise a start marker stands before a list of
        objects, or a pair of markers around each object, depending on the markers that the vocabulary has."""
        tools = wanted.tools
        if self.bare:
            return CallGrammar("", self._objects(writer, wanted, "parameters"), "; ")
        if self.named and writer.is_token("[ARGS]"):
            (begin,) = self.begins
            heads = (f"{writer.literal(f'{tool.name}[ARGS]')} {writer.add_schema(tool.parameters)}" for tool in tools)
            return CallGrammar(begin, any_of(writer, heads), "")
        # A marker without an end stands before a list; one with an end is of one call.
        lists = [begin for begin in sorted(self.begins) if f"</{begin[1:]}" not in self.ends]
        call = self._objects(writer, wanted, "arguments")
        if lists and (not self.ends or writer.is_token(lists[0])):
            calls = list_of(writer, call, ", ", parallel=wanted.parallel)
            opening = writer.literal(" [" if self.named else "[")
            return CallGrammar(lists[0], f"{opening} {calls} {writer.literal(']')}")
        (end,) = self.ends
        closing = writer.literal(f"\n{end}")
        return CallGrammar(f"<{end[2:]}", f"{writer.literal(chr(10))} {call} {closing}", "\n")

    def _objects(self, writer: GrammarWriter, wanted: WantedCalls, key: str) -> str:
        """Return the expression of one call of any of the tools: an object with the tool's name, and under `key` the
        arguments by its schema."""
        heads = [f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ' for tool in wanted.tools]
        schemas = [writer.add_schema(tool.parameters) for tool in wanted.tools]
        ends = writer.literal("}")
        pairs = zip(heads, schemas, strict=True)
        return any_of(writer, [f"{writer.literal(head)} {schema} {ends}" for head, schema in pairs])


class JsonToolParser:
    """Parses content, and calls between markers. Calls are objects or lists of objects, with separators between
    them."""

    __slots__ = (
        "_body",
        "_call",
        "_content",
        "_format",
        "_header",
        "_held",
        "_held_from",
        "_marked",
        "_names",
        "_writer",
        "parse_text",
    )
    thinking = False

    def __init__(self, call_format: JsonCallFormat, names: Collection[str], writer: PartWriter) -> None:
        self._format = call_format
        self._names = names
        self._writer = writer
        self._content = TrimmedWriter(writer.write_content, strip_start=False)
        # Within markers: the marker and the text after it, until a call has its name.
        self._body: str | None = None
        self._call: JsonCall | None = None
        self._header: str | None = None
        self._marked = False
        # All that has come from the first start marker on that stands in a string of an object that may be text: pairs
        # of a text, and whether the text is a marker. None: no such marker has come. `_held_from` is the number of the
        # object's characters before the marker.
        self._held: list[tuple[str, bool]] | None = None
        self._held_from = 0
        self.parse_text: Callable[[str], None] = self._at_start if call_format.bare else self._content.write

    def parse_marker(self, marker: str) -> None:
        """Begin calls at a start marker, and end them at an end marker; unfinished text without a name becomes content.
        A marker within a string, or another marker within a call, is text of the call. If the string's object turns out
        not to be a call, its first start marker begins calls after all. [ARGS] and [CALL_ID] belong to the header of a
        named call. Any other marker is content."""
        if self._body is None:
            self.parse_text = self._content.write
        call = self._call
        begins = marker in self._format.begins
        if call is not None and call.in_string:
            if self._held is None and begins and call.may_be_text:
                self._held, self._held_from = [], len(call.raw)
            self._in_body(marker, is_marker=True)
        elif begins:
            self._give_up()
            self._begin(marker)
            self._marked = True
        elif self._body is not None and marker in self._format.ends:
            self._give_up(marker)
            self._end_body()
        elif self._body is not None and self._header is not None and marker in ("[ARGS]", "[CALL_ID]"):
            self._header += marker
        elif self._body is not None and self._call is not None:
            self._in_body(marker, is_marker=True)
        elif self._body is not None and self._header is None:
            self._end_calls(marker)
        else:
            self._content.write(marker)

    def end(self, cut: str = "") -> None:
        """End the answer, and the call in progress (see `_give_up`). The beginning of a start or end marker is dropped
        where `_expects_marker`."""
        if cut and not (self._expects_marker and begins_one(cut, self._format.begins | self._format.ends)):
            self.parse_text(cut)
        self._give_up()
        self._content.release()

    @property
    def _expects_marker(self) -> bool:
        """Whether the next text may well be a start or end marker: only separators have come since a call or its
        marker, or a call that has its name is not within a string."""
        if self._body is None:
            return self._content.drops_space
        if self._call is None:
            return self._header is None
        return self._call.named and not self._call.in_string

    def _at_start(self, text: str) -> None:
        """Parse the first text of an answer that may be only a call, without a marker. A brace begins the call; other
        text is content, as all is then up to a start marker. After white space, the decision is still open."""
        if text.isspace():
            self._content.write(text)
        elif text.lstrip()[0] == "{":
            self._begin("")
            self._in_body(text)
        else:
            self._content.write(text)
            self.parse_text = self._content.write

    def _begin(self, marker: str) -> None:
        self._body, self.parse_text = marker, self._in_body
        self._call = self._header = None

    def _end_body(self) -> None:
        self._body, self.parse_text = None, self._content.write

    def _in_arguments(self, text: str) -> None:
        """Write text that begins within arguments, in a short path since most text of calls is of arguments. Text after
        their end is parsed as usual."""
        call = self._call
        end = 0 if call is None else call.stream_arguments(text)
        if call is None or not call.streams:
            self._in_body(text, end)

    def _in_body(self, text: str, at: int = 0, *, is_marker: bool = False) -> None:
        """Parse text of calls: separators, then one call after another. White space of content that is still held back
        is dropped when a call gets its name. If a call fails before its name, its text and what follows are content up
        to a start marker, even one in a string. If it fails later, the text up to the end marker becomes arguments."""
        self.parse_text = self._in_body
        if self._held is not None:
            self._held.append((text, is_marker))
        while at < len(text):
            if self._call is None:
                at = self._between(text, at)
                if self._call is None:
                    return
            call = self._call
            at = call.feed(text, at)
            if call.named:
                self._held = None
                self._content.drop()
                if call.streams:
                    # All text was read.
                    self.parse_text = self._in_arguments
                    return
            if call.done:
                self._call, self._body = None, ""
            elif call.failed:
                if call.named:
                    # Broken JSON: the arguments are the model's text up to the end marker.
                    self._writer.write_arguments(text[at:])
                    return
                if self._parse_held():
                    return
                self._give_up()
                self._end_body()
                if at < len(text):
                    self._content.write(text[at:])
                return

    def _between(self, text: str, at: int) -> int:
        """Skip separators before a call, and begin the call at its brace or its name. Other text is content (see
        `_write_content`), and NO_CALL_FOUND is noted if no call has ended since the start marker. Returns the index
        from which to read on."""
        start, body = at, self._body or ""
        if self._header is not None:
            return self._in_header(text, at)
        while at < len(text) and text[at] in _SEPARATORS:
            at += 1
        if at < len(text) and text[at] == "{":
            self._body = body + text[start:at]
            self._call = JsonCall(self._writer, self._names if self._format.bare and not self._marked else None)
        elif at < len(text) and self._format.named and (body + text[start:at]).rstrip() in self._format.begins:
            self._body = body + text[start:at]
            self._header = ""
            return self._in_header(text, at)
        elif at < len(text):
            self._end_calls(text[start:])
        else:
            self._body = body + text[start:]
        return at

    def _end_calls(self, text: str) -> None:
        """Take text that begins no call as content, with what came before; a marker there makes it NO_CALL_FOUND."""
        body = self._body or ""
        self._end_body()
        if body.strip(_SEPARATORS):
            self._writer.note_no_call()
        self._write_content(body, text)

    def _write_content(self, body: str, text: str) -> None:
        """Write `text`, with the start marker or the separators that came before it, as content. Behind a call, white
        space and the bracket that ends the list of calls are dropped."""
        text = body + text
        behind_call = self._content.drops_space and not body.strip(_SEPARATORS)
        found = _LIST_END.match(text) if behind_call else None
        self._content.write(text[found.end() :] if found else text)

    def _in_header(self, text: str, at: int) -> int:
        """Read a call's name, up to the brace of its arguments; there the call begins, and its name is written. Text
        without the brace is kept, and the next text continues it. If there is no name, or more than MAX_NAME_CHARS
        characters come before the brace, the text is content, and NO_CALL_FOUND is noted. Returns the index of the
        brace if the call begins, else the end of the text."""
        brace = text.find("{", at)
        end = brace if brace >= 0 else len(text)
        header = self._header = (self._header or "") + text[at:end]
        fits = len(header) <= MAX_NAME_CHARS
        if fits and brace < 0:
            return end
        self._header = None
        name = header.partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
        if fits and name:
            self._call = JsonCall.of_arguments(self._writer, name)
            return end
        self._end_calls(header + text[end:])
        return len(text)

    def _parse_held(self) -> bool:
        """If a start marker stands in a string of an object that is no call, end the object before the marker, and
        parse the marker and all that has come after it. The text before is content. Returns whether there was such a
        marker."""
        held, call = self._held, self._call
        if held is None or call is None:
            return False
        self._write_content(self._body or "", call.raw[: self._held_from])
        self._held = self._call = None
        self._end_body()
        for text, is_marker in held:
            (self.parse_marker if is_marker else self.parse_text)(text)
        return True

    def _give_up(self, end_marker: str = "") -> None:
        """End the call in progress; a marker that is held in it is parsed first (see `_parse_held`). If it has no name,
        its text and the end marker become content, and NO_CALL_FOUND is added to the writer's failures, unless the text
        was a bare object. White space and separators alone are dropped, and so is a start marker that neither a call
        nor an end marker follows."""
        self._parse_held()
        header, call, body = self._header, self._call, self._body or ""
        self._header = self._call = None
        if header is not None:
            text = header + end_marker
        elif call is not None and not call.named:
            text = call.raw + end_marker
        elif call is None and body.strip(_SEPARATORS) and end_marker:
            text = end_marker
        else:
            return
        # Without a marker, an object that is no call is an answer.
        if self._marked or not self._format.bare:
            self._writer.note_no_call()
        self._write_content(body, text)
