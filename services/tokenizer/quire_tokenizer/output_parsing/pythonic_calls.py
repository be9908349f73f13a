"""Tool calls as a list of Python calls: `[get_weather(city="Paris"), ...]`. The code is parsed but never run."""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING

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


class PythonicToolParser:
    """Parses an answer that begins with such a list as calls, and any other answer as content. A call is written when
    it is complete."""

    __slots__ = ("_at", "_content", "_depth", "_opening", "_quote", "_state", "_text", "_writer")
    thinking = False

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._content = TrimmedWriter(writer.write_content, strip_start=False)
        # Parses `_text` and returns whether there is more to parse.
        self._state: Callable[[], bool] = self._in_start
        self._text = self._opening = ""
        self._at = self._depth = 0
        self._quote = ""

    def parse_text(self, text: str) -> None:
        self._text += text
        while self._state():
            pass

    def parse_marker(self, marker: str) -> None:
        """Drop a marker before the list. Any other marker is text."""
        if self._state != self._in_start or self._text.strip():
            self.parse_text(marker)

    def end(self) -> None:
        self._give_up()
        self._content.release()

    def _in_start(self) -> bool:
        if _BEGIN.match(self._text):
            # The bracket is content only if no call follows it.
            self._opening, self._text = "[", self._text.lstrip()[1:]
            self._state = self._in_list
            return True
        if len(self._text) > MAX_NAME_CHARS or not _MAY_BEGIN.fullmatch(self._text):
            self._give_up()
        return False

    def _in_content(self) -> bool:
        text, self._text = self._text, ""
        self._content.write(text)
        return False

    def _in_list(self) -> bool:
        """Skip commas, and begin a call or end the list."""
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
        """Look for the call's end, and write a complete call."""
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
                if self._depth > _MAX_DEPTH or self._depth < 0:
                    break
                if not self._depth and character == ")":
                    return self._write(text[: self._at])
        if self._depth > _MAX_DEPTH or self._depth < 0 or len(text) > _MAX_CALL_CHARS:
            self._give_up()
            return False
        self._at = max(self._at, len(text))
        return False

    def _write(self, call: str) -> bool:
        """Write a complete call. Text that is not a call with literal keyword arguments is content."""
        found = _parse(call)
        if found is None:
            self._give_up()
            return False
        self._text, self._state, self._opening = self._text[len(call) :], self._in_list, ""
        self._writer.write_call(found[0])
        self._writer.write_arguments(found[1])
        return True

    def _give_up(self) -> None:
        if self._state == self._in_call:
            self._writer.note_no_call()
        text, self._text, self._opening, self._state = self._opening + self._text, "", "", self._in_content
        if text:
            self._content.write(text)


def _parse(call: str) -> tuple[str, str] | None:
    """Return the name, and the arguments as JSON; None if this is not a call with literal keyword arguments."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not isinstance(tree.func, ast.Name | ast.Attribute):
            return None
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
        if None in values:
            return None
        return ast.unparse(tree.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
