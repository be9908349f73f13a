"""Tool calls as a list of Python calls: `[get_weather(city="Paris"), ...]`. The code is parsed but never run."""

from __future__ import annotations

import ast
import json
import keyword
import re
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.json_values import DECODER, ENCODER
from quire_tokenizer.output_parsing.parts import MAX_NAME_CHARS
from quire_tokenizer.output_parsing.whitespace import TrimmedWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_tokenizer.output_parsing.parts import PartWriter

_BEGIN = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
_MAY_BEGIN = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\(?)?)?")
_MAX_CALL_CHARS = 65_536
_MAX_DEPTH = 64
_STRUCTURE = re.compile(r"[\"'\\()\[\]{}]")
_BETWEEN = " \t\r\n,"
_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.ASCII | re.DOTALL)
# Of numbers, those that any JSON parser reads as Python does.
_LEXEME = re.compile(
    r"""("[^"\\\x00-\x1f]*"|'[^'\\\x00-\x1f]*'|[A-Za-z_]\w*=?|-?(?:0|[1-9]\d{0,15})(?:\.\d{1,15})?|[\[\]{},:])""",
    re.ASCII,
)
# Lexemes that begin with one of these are the same in JSON.
_SAME = frozenset('"-0123456789[]{}')
_TRANSLATED = {"True": "true", "False": "false", "None": "null", ",": ", ", ":": ": "}
# The functions of `json` make a new encoder for each value, unless all options are the default ones.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class PythonicToolParser:
    """Parses an answer that begins with such a list as calls, and any other answer as content. A call is written when
    it is complete."""

    __slots__ = ("_at", "_content", "_depth", "_opening", "_quote", "_state", "_text", "_writer", "parse_text")
    thinking = False

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._content = TrimmedWriter(writer.write_content, strip_start=False)
        # Parses `_text` and returns whether there is more to parse.
        self._state: Callable[[], bool] = self._in_start
        self.parse_text: Callable[[str], None] = self._in_calls
        self._text = self._opening = ""
        self._at = self._depth = 0
        self._quote = ""

    def _in_calls(self, text: str) -> None:
        """Append text, and parse as far as possible. Within a call, text without quotes, brackets or backslashes only
        waits, until _MAX_CALL_CHARS characters wait."""
        self._text += text
        if self._depth and not _STRUCTURE.search(text) and len(self._text) < _MAX_CALL_CHARS:
            return  # within a call
        while self._state():
            pass

    def parse_marker(self, marker: str) -> None:
        """Drop a marker if only white space has come so far. Any other marker is text."""
        if self.parse_text != self._in_calls or self._state != self._in_start or self._text.strip():
            self.parse_text(marker)

    def end(self, cut: str = "") -> None:
        """End the answer. The beginning of a marker is text. The text of an unfinished call, with NO_CALL_FOUND in the
        writer's failures, or of an unfinished list that has no call yet becomes content. White space that was held back
        is written."""
        if cut:
            self.parse_text(cut)
        if self.parse_text == self._in_calls:
            self._give_up()
        self._content.release()

    def _in_start(self) -> bool:
        """Look for the beginning of the list: a bracket, a name and a parenthesis. Returns True if it is there, False
        if more text is needed. An answer that begins otherwise, or whose beginning has more than MAX_NAME_CHARS
        characters, white space included, is content. White space before the list is dropped."""
        found = _BEGIN.match(self._text)
        if found and found.end() <= MAX_NAME_CHARS:
            # The bracket is content only if no call follows it.
            self._opening, self._text = "[", self._text.lstrip()[1:]
            self._state = self._in_list
            return True
        if found or len(self._text) >= MAX_NAME_CHARS or not _MAY_BEGIN.fullmatch(self._text):
            self._give_up()
        return False

    def _in_list(self) -> bool:
        """Skip commas and white space, and end the list at `]` or begin a call at any other character. Returns True if
        a call begins, False if more text is needed or the list has ended. Text after the list, without the white
        space before it, is content."""
        self._text = self._text.lstrip(_BETWEEN)
        if not self._text:
            return False
        if self._text[0] == "]":
            self._text = self._text[1:]
            self._content.drop()
            self._give_up()
            return False
        self._state, self._at, self._depth, self._quote = self._in_call, 0, 0, ""
        return True

    def _in_call(self) -> bool:
        """Look for the parenthesis that ends the call, outside quotes and inner brackets, and write the complete call.
        Returns whether there is more to parse. A call that is nested deeper than _MAX_DEPTH, is longer than
        _MAX_CALL_CHARS or has a closing bracket too many becomes content, with the rest of the answer."""
        text = self._text
        while found := _STRUCTURE.search(text, self._at):
            character, self._at = found.group(), found.end()
            if character == "\\":
                self._at += 1
            elif self._quote or character in "\"'":
                if not self._quote:
                    self._quote = character
                elif character == self._quote:
                    self._quote = ""
            else:
                self._depth += 1 if character in "([{" else -1
                if self._depth > _MAX_DEPTH or self._depth < 0 or self._at > _MAX_CALL_CHARS:
                    break
                if not self._depth and character == ")":
                    return self._write(text[: self._at])
        if self._depth > _MAX_DEPTH or self._depth < 0 or len(text) >= _MAX_CALL_CHARS:
            self._give_up()
            return False
        self._at = max(self._at, len(text))
        return False

    def _write(self, call: str) -> bool:
        """Write a complete call, and return True. Text that is not a call with literal keyword arguments is content, as
        the rest of the answer; then return False."""
        found = _parse(call)
        if found is None:
            self._give_up()
            return False
        self._text, self._state, self._opening = self._text[len(call) :], self._in_list, ""
        self._writer.write_call(found[0])
        self._writer.write_arguments(found[1])
        return True

    def _give_up(self) -> None:
        """Take the rest of the answer as content, and write the text that was not parsed, with the opening bracket if
        no call was written. This also ends a complete list, where only the text after the list is left. If a call had
        begun, NO_CALL_FOUND is added to the writer's failures."""
        if self._state == self._in_call:
            self._writer.note_no_call()
        self.parse_text = self._content.write
        text, self._text, self._opening = self._opening + self._text, "", ""
        if text:
            self._content.write(text)


def _parse(call: str) -> tuple[str, str] | None:
    """Return the name, and the arguments as JSON. None if this is not a call whose arguments are all keywords with
    literal values, or if JSON cannot express a value, such as a set or an infinite number. Tuples become lists, and
    keys of dicts strings. The name may have dots."""
    plain = _parse_plain(call)
    if plain is not None:
        return plain
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not isinstance(tree.func, ast.Name | ast.Attribute):
            return None
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
        if None in values:
            return None
        name = tree.func.id if isinstance(tree.func, ast.Name) else ast.unparse(tree.func)
        return name, _ENCODER.encode(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _parse_plain(call: str) -> tuple[str, str] | None:
    """Return name and arguments as `_parse` does, for a call whose name has no dots and whose values need only other
    quotes and other constants to be JSON. None for any other text, such as values with backslashes or long numbers,
    which `_parse` may still read. Python's own parser takes twice as long."""
    head = _CALL.fullmatch(call)
    if head is None or keyword.iskeyword(head[1]):
        return None
    parts = _LEXEME.split(head[2])
    if "".join(parts[::2]).strip(" "):
        return None
    keys, translated = list[str](), list[str]()
    for lexeme in parts[1::2]:
        first, last = lexeme[0], lexeme[-1]
        if last == "=":
            keys.append(lexeme[:-1])
            lexeme = f'"{lexeme[:-1]}": '
        elif first == "'":
            lexeme = f'"{lexeme[1:-1]}"' if '"' not in lexeme else ENCODER.encode(lexeme[1:-1])
        elif first not in _SAME:
            lexeme = _TRANSLATED.get(lexeme, "?")
        translated.append(lexeme)
    try:
        # With spaces between them, no two lexemes become one. Only the call itself has keys without quotes, and each of
        # them once.
        values = DECODER.decode(f"{{{' '.join(translated)}}}")
    except (ValueError, RecursionError):
        return None
    if list(values) != keys or any(map(keyword.iskeyword, keys)):
        return None
    return head[1], f"{{{''.join(translated)}}}"
