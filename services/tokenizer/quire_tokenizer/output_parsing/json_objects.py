"""A tool call that is one JSON object with a name and arguments. JsonCall does not know of markers or of other calls.

Arguments are slices of the model's text. Nothing of a call is written before its name is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing.json_values import WHITESPACE, ValueScanner, decode_string

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from quire_tokenizer.output_parsing.parts import PartWriter

_NO_VALUE = ValueScanner("0")
_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# An object without markers that has another key before its name is not a call.
_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"type", "id"}


class JsonCall:
    """Parses one JSON object. Call `feed` until the object is `done` or `failed`."""

    __slots__ = (
        "_accept",
        "_alone",
        "_arguments",
        "_key",
        "_parts",
        "_raw",
        "_scanner",
        "_state",
        "_writer",
        "done",
        "failed",
        "named",
        "streams",
    )

    def __init__(self, writer: PartWriter, accept: Collection[str] | None = None) -> None:
        """`accept`: the valid names, if no marker says that the object is a call; None: any name."""
        self._writer = writer
        self._accept = accept
        self._alone = False
        self._state: Callable[[str, int], int] = self._open
        self._scanner = _NO_VALUE
        self._key = ""
        self._parts: list[str] = []  # of a value that is buffered until its end
        self._arguments: str | None = None  # arguments before the name; "" once written
        self._raw: list[str] = []
        self.done = self.failed = self.named = False
        self.streams = False
        """Whether the next text is of arguments that are written as they come."""

    @classmethod
    def of_arguments(cls, writer: PartWriter, name: str) -> JsonCall:
        """Return a parser for a call whose name is known, and write the name. The object that `feed` gets is the
        arguments."""
        call = cls(writer)
        call._key, call._alone, call._state = "arguments", True, call._before_value
        call._name(name)
        return call

    @property
    def in_string(self) -> bool:
        """Whether the next character is within a string, where markers are text."""
        return self._scanner.in_string

    @property
    def may_be_text(self) -> bool:
        """Whether the object may turn out to be text, and the next character is not within arguments. Then a marker is
        a part of the object only if the object turns out to be a call."""
        in_arguments = self._state == self._in_value and self._key in _ARGUMENT_KEYS
        return self._accept is not None and not self.named and not in_arguments

    @property
    def raw(self) -> str:
        """The text so far of a call that has no name yet."""
        return "".join(self._raw)

    def feed(self, text: str, at: int) -> int:
        """Read text from `at` on. Return the index after the text that was read: its end, unless the object ended or
        failed before."""
        start, end = at, len(text)
        while at < end and not (self.done or self.failed):
            at = self._state(text, at)
        if not self.named:
            self._raw.append(text[start:at])
        return at

    def _open(self, text: str, at: int) -> int:
        return self._next(text, at, "{", self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        """Skip white space and a comma before a key, begin the key at its quote, or end the object at its brace. Any
        other character fails the call. Returns the index after the text that was read."""
        at = _skip(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at + 1)
        if text[at] == ",":
            return at + 1
        if text[at] != '"':
            return self._fail(at)
        self._scanner, self._parts, self._state = ValueScanner('"'), ['"'], self._in_key
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        """Read a key up to its closing quote. An object without markers fails at a key that calls do not have, before
        its name. Returns the index after the text that was read."""
        end = self._scanner.feed(text, at)
        if end < 0:
            self._parts.append(text[at:])
            return len(text)
        self._key = decode_string(self._take_value(text[at:end])) or ""
        if self._accept is not None and not self.named and self._key not in _KEYS:
            return self._fail(end)
        self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        return self._next(text, at, ":", self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        """Begin the value of a key. Arguments after the name, unless they are a string, are written as they come; other
        values are buffered. Returns the index after the text that was read. Fails the call if no value is there."""
        at = _skip(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first in ",:]}":
            return self._fail(at)
        self._scanner = ValueScanner(first)
        self.streams = self.named and self._key in _ARGUMENT_KEYS and self._arguments is None and first != '"'
        if self.streams:
            self._arguments = ""
            self._writer.write_arguments(first)
        self._parts = [first]
        self._state = self.stream_arguments if self.streams else self._in_value
        return at + 1

    def stream_arguments(self, text: str, at: int = 0) -> int:
        """Write arguments from `at` on as they come, up to their end, where a call of `of_arguments` is `done`. Returns
        the index after the text that was read. `feed` calls this function; while the call `streams`, others may too."""
        end = self._scanner.feed(text, at)
        if end < 0:
            self._writer.write_arguments(text[at:])
            return len(text)
        self._writer.write_arguments(text[at:end])
        self._scanner, self._state = _NO_VALUE, self._before_key
        self.streams, self.done = False, self._alone
        return end

    def _in_value(self, text: str, at: int) -> int:
        """Buffer a value up to its end, and process it. A name begins the call; one that is empty, no string or not
        accepted fails the call. Arguments are written, or kept until the name comes; a string counts as its text, even
        if that is no JSON, and as {} if it is empty or has invalid escapes. Only the first name and the first arguments
        count; other values are dropped. Returns the index after the text that was read."""
        end = self._scanner.feed(text, at)
        if end < 0:
            self._parts.append(text[at:])
            return len(text)
        self._state = self._before_key
        value = self._take_value(text[at:end])
        if self._key in _NAME_KEYS and not self.named:
            name = decode_string(value)
            if not name or (self._accept is not None and name not in self._accept):
                return self._fail(end)
            self._name(name)
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            # Some models write the arguments as a string that holds JSON, as OpenAI's API does.
            value = value if value[0] != '"' else decode_string(value) or "{}"
            if self.named:
                self._writer.write_arguments(value)
                self._arguments = ""
            else:
                self._arguments = value
        return end

    def _name(self, name: str) -> None:
        """Begin the call with this name, and write the arguments that came before the name."""
        self.named = True
        self._raw.clear()
        self._writer.write_call(name)
        if self._arguments:
            self._writer.write_arguments(self._arguments)
            self._arguments = ""

    def _close(self, end: int) -> int:
        """End the object, and write empty arguments if it had none. An object without a name fails. Returns `end`."""
        if not self.named:
            return self._fail(end)
        if self._arguments is None:
            self._writer.write_arguments("{}")
        self.done = True
        return end

    def _take_value(self, last: str) -> str:
        """Return a buffered value with its last piece, and reset the scanner."""
        value, self._scanner = "".join((*self._parts, last)), _NO_VALUE
        return value

    def _next(self, text: str, at: int, character: str, state: Callable[[str, int], int]) -> int:
        """Skip white space, and read this character, after which `state` reads on. Any other character fails the call.
        Returns the index after the text that was read."""
        at = _skip(text, at)
        if at == len(text):
            return at
        if text[at] != character:
            return self._fail(at)
        self._state = state
        return at + 1

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def _skip(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not white space, else the text's length."""
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at
