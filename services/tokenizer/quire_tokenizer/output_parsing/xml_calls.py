"""Tool calls whose parameters stand between tags: Qwen3-Coder, MiniMax, GLM. Values get their types from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_tokenizer.output_parsing.call_grammar import CallGrammar, any_of, list_of, part_of
from quire_tokenizer.output_parsing.json_values import ENCODER
from quire_tokenizer.output_parsing.marker_finder import begins_one
from quire_tokenizer.output_parsing.parts import MAX_NAME_CHARS
from quire_tokenizer.output_parsing.schemas import ToolSchemas
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_tokenizer.output_parsing.call_grammar import GrammarWriter, ToolFunction, WantedCalls
    from quire_tokenizer.output_parsing.parts import PartWriter


@dataclass(frozen=True, slots=True)
class XmlCallFormat:
    """Markers of a family. The name stands between `name` and `name_end`; with an empty `name`, it follows
    `begin`. A parameter's key stands between `key` and `key_end`, its value between `value` and `value_end`. With an
    empty `value`, the value follows `key_end`."""

    begin: str
    end: str
    name: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    lines: bool = False
    """Whether values stand on lines of their own."""
    section: bool = False
    """Whether a section holds all calls."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers. The end of a name or key within a tag, such as `>`, is not a marker."""
        tags = {self.begin, self.end, self.name, self.call_end, self.key, self.value, self.value_end}
        return frozenset(tags - {""}) | ({self.key_end} if self.key_end.startswith("</") else frozenset())

    def write_calls(self, writer: GrammarWriter, wanted: WantedCalls) -> CallGrammar:
        """Write the grammar of a block of calls between `begin` and `end`. With `section`, the block has all calls;
        else it has one call, and line breaks stand between blocks. Parameters come in the order of the schema; strings
        are free text, unless the schema lists them."""
        schemas = ToolSchemas([{"name": tool.name, "parameters": tool.parameters} for tool in wanted.tools])
        call = any_of(writer, [self._call(writer, tool, schemas) for tool in wanted.tools])
        if self.section:
            call = list_of(writer, call, "", parallel=wanted.parallel)
        opening = f"{writer.literal(chr(10))} " if self.name else ""
        return CallGrammar(self.begin, f"{opening}{call} {writer.literal(self.end)}", None if self.section else "\n")

    def _call(self, writer: GrammarWriter, tool: ToolFunction, schemas: ToolSchemas) -> str:
        """Return the expression of a call of this tool: its name, then the parameters in the order of its schema.
        Parameters that are not required may be left out."""
        head = writer.literal(f"{self.name}{tool.name}{self.name_end}{chr(10) if self.name else ''}")
        required = tool.parameters.get("required")
        parts = [head]
        for key, schema in tool.properties.items():
            value = self._value(writer, tool, key, schema, schemas)
            needed = isinstance(required, list) and key in required
            parts.append(value if needed else f"({value})?")
        if self.call_end:
            parts.append(writer.literal(f"{self.call_end}\n"))
        return writer.add_rule("call", " ".join(parts))

    def _value(self, writer: GrammarWriter, tool: ToolFunction, key: str, schema: Any, schemas: ToolSchemas) -> str:
        """Return the expression of a parameter, its key and value between their markers. The value is one of the
        schema's enum if all of these are strings; free text up to the end marker if it may be a string, or the schema
        does not say; else JSON of its schema."""
        line = "\n" if self.lines else ""
        between = f"\n{self.value}" if self.value else ""
        head, end = writer.literal(f"{self.key}{key}{self.key_end}{between}{line}"), f"{line}{self.value_end}\n"
        texts = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
            return f"{head} {any_of(writer, map(writer.literal, texts))} {writer.literal(end)}"
        if "string" in schemas.types(tool.name, key) or schemas.is_text(tool.name, key):
            return f"{head} {writer.until(end)}"
        return f"{head} {writer.add_schema(part_of(tool.parameters, schema))} {writer.literal(end)}"


class XmlToolParser:
    """Parses content, and calls. Writes each parameter as JSON when it comes."""

    __slots__ = (
        "_body",
        "_content",
        "_count",
        "_format",
        "_fresh",
        "_held",
        "_in_content",
        "_key",
        "_name",
        "_schemas",
        "_value",
        "_writer",
        "parse_text",
    )
    thinking = False

    def __init__(self, call_format: XmlCallFormat, schemas: ToolSchemas, writer: PartWriter) -> None:
        self._format = call_format
        self._schemas = schemas
        self._writer = writer
        self._content = TrimmedWriter(writer.write_content, strip_start=False)
        self._in_content = self._content.write
        self.parse_text: Callable[[str], None] = self._in_content
        self._body = self._name = self._key = self._held = ""
        self._value: list[str] | None = None  # of a value that is buffered until its end
        self._fresh = False  # a string value has begun: skip one line break
        self._count = 0

    def parse_marker(self, marker: str) -> None:
        """Move between the parts of a call: its begin, name, keys, values and end. Within a value, any marker but its
        end is text. A marker that does not fit is skipped in a call whose name is known. Anywhere else it is content,
        with the text of a call that has no name yet; then content goes on until the next begin marker."""
        call_format, state = self._format, self.parse_text
        if state == self._in_value and marker != call_format.value_end:
            self._in_value(marker)
        elif state == self._in_value:
            self._end_value()
        elif marker == call_format.begin and state == self._in_content:
            self._body, self._name = marker, ""
            self.parse_text = self._between if call_format.name else self._in_name
        elif marker == call_format.name and state == self._between and not self._name:
            self._body += marker
            self.parse_text = self._in_name
        elif marker == call_format.key and (
            state == self._between or (state == self._in_name and not call_format.name)
        ):
            if state == self._in_name:
                self._begin_call()
            if self._name:
                self._key, self.parse_text = "", self._in_key
            else:
                self._give_up(marker)
        elif marker == call_format.key_end and state == self._in_key:
            self.parse_text = self._before_value
        elif marker == call_format.value and state == self._before_value:
            self._begin_value()
        elif marker == call_format.call_end and self._name:
            self._end_call()
        elif marker == call_format.end and state != self._in_content:
            self._end_section()
        elif state != self._in_content and not self._name:
            self._give_up(marker)
        elif state == self._in_content:
            self._content.write(marker)

    def end(self, cut: str = "") -> None:
        """End the answer. The beginning of a marker is dropped behind a call, and between the name and the values of an
        unfinished one; elsewhere it is text. The arguments of an unfinished call stay incomplete. A call without a name
        is content."""
        if self.parse_text == self._in_content:
            behind_call = self._content.drops_space
        else:
            behind_call = self.parse_text == self._between and not self._name and not self._body.strip()
        if cut and not (behind_call and begins_one(cut, self._format.markers)):
            self.parse_text(cut)
        if self.parse_text != self._in_content and not self._name and self._body:
            self._give_up("")
        self._content.release()

    def _between(self, text: str) -> None:
        """Skip text between the parts of a call. Before the name, and behind the end of a call, only white space may
        come; after any other text, what was read there is content (see `_give_up`)."""
        if not self._name:
            if text.isspace():
                self._body += text
            else:
                self._give_up(text)

    def _before_value(self, text: str) -> None:
        """Skip text between a key and its value."""

    def _in_name(self, text: str) -> None:
        """Read a name up to `name_end`, which may have begun in an earlier piece of text, and begin the call. If the
        markers, white space and name reach MAX_NAME_CHARS characters, they are content (see `_give_up`)."""
        self._held += text
        if not self._format.name:
            self._held = self._held.lstrip()
        name, found, rest = self._held.partition(self._format.name_end)
        self._body += text[: len(text) - len(rest)]
        if len(self._body) - bool(found) >= MAX_NAME_CHARS:
            self._give_up("")
        elif found:
            self._held = name
            self._begin_call()
        if rest:
            self.parse_text(rest)

    def _in_key(self, text: str) -> None:
        """Read a key. Without a marker for values, the key ends at `key_end` in the text, and the value begins. If such
        a key reaches MAX_NAME_CHARS characters, the call ends with the parameters that it has, and the key is content;
        no failure is noted."""
        self._key += text
        if self._format.value:
            return
        key, found, rest = self._key.partition(self._format.key_end)
        if len(self._key) - len(rest) - bool(found) >= MAX_NAME_CHARS:
            self._end_call()
            self._give_up(self._key)
        elif found:
            self._key = key
            self._begin_value()
            if rest:
                self._in_value(rest)

    def _begin_call(self) -> None:
        """Begin the call whose name was read, without the white space around it. Without a name, the text is content
        (see `_give_up`)."""
        name, self._held = self._held.strip(), ""
        if not name:
            self._give_up("")
            return
        self._content.drop()
        self._writer.write_call(name)
        self._name, self._count, self.parse_text = name, 0, self._between

    def _begin_value(self) -> None:
        """Write the key whose text was read, and begin its value. A value that can only be a string, or whose type the
        schema does not say, is written as it comes; other values are buffered."""
        key = self._key.strip()
        self._writer.write_arguments(f"{', ' if self._count else '{'}{ENCODER.encode(key)}: ")
        self._count += 1
        self._key, self.parse_text, self._held = key, self._in_value, ""
        self._value = [] if not self._schemas.is_text(self._name, key) else None
        if self._value is None:
            self._writer.write_arguments('"')
            self._fresh = True

    def _in_value(self, text: str) -> None:
        """Write a string as it comes; buffer a value of another type. One line break at its start and end is
        dropped."""
        if self._value is not None:
            self._value.append(text)
            return
        if self._fresh:
            text, self._fresh = text.removeprefix("\n"), False
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        self._writer.write_arguments(kept if kept.isalnum() else ENCODER.encode(kept)[1:-1])

    def _end_value(self) -> None:
        """End a value: write the closing quote, or the buffered text, without one line break at its start and end, as
        JSON (see ToolSchemas.value)."""
        if self._value is None:
            self._writer.write_arguments('"')
        else:
            text = "".join(self._value).removeprefix("\n").removesuffix("\n")
            self._writer.write_arguments(self._schemas.value(self._name, self._key, text))
        self._value, self._held, self.parse_text = None, "", self._between

    def _end_call(self) -> None:
        self._writer.write_arguments("}" if self._count else "{}")
        self._name, self._body, self.parse_text = "", "", self._between

    def _end_section(self) -> None:
        """End the section. A call without an end marker ends here; a call without a name is content (see
        `_give_up`)."""
        if self.parse_text == self._in_name and not self._format.name and self._held:
            self._begin_call()
        if self._name:
            self._end_call()
        elif self._body.strip():
            self._give_up(self._format.end)
        self._body, self.parse_text = "", self._in_content

    def _give_up(self, text: str) -> None:
        """Write the text of a call without a name, and then `text`, as content. If the text of the call is more than
        white space behind the last call, NO_CALL_FOUND is added to the writer's failures. The rest of the answer is
        content until the next begin marker."""
        body, self._body, self._held, self.parse_text = self._body, "", "", self._in_content
        if body.strip():
            self._writer.note_no_call()
        if body + text:
            self._content.write(body + text)
