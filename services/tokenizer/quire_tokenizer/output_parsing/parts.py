"""Parts of an answer: each character of its text is content, reasoning, a tool's name or a call's arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

from quire_common.errors import require
from quire_common.finish import PartKind
from quire_tokenizer.output_parsing.json_values import DECODER, ValueScanner

NO_CALL = -1
# Plain integers: comparing enum members for every token is slow.
_CONTENT, _REASONING = PartKind.CONTENT.value, PartKind.REASONING.value
_NAME, _ARGUMENTS = PartKind.TOOL_NAME.value, PartKind.TOOL_ARGUMENTS.value
MAX_NAME_CHARS = 1024
"""The longest name of a tool. Longer text before a separator is not a name."""


class Part(NamedTuple):
    """A part with `chars` characters. `kind` is a PartKind, `call` the index of the tool call, NO_CALL for text."""

    kind: int
    call: int
    chars: int


# Parts of a few characters come again and again, and the making of a named tuple is slow.
_part = lru_cache(maxsize=4096)(Part)

NO_CALL_FOUND, BAD_ARGUMENTS, UNFINISHED = "no_call", "bad_arguments", "unfinished"
"""The faults of a call: its text is no call and became content; its arguments are not JSON; the answer ends
within its arguments."""


class OutputParser(Protocol):
    """Splits one answer into parts, and writes them to a PartWriter. The parts depend only on the text and its markers,
    not on the pieces in which they come. A parser raises nothing, whatever a model writes."""

    @property
    def thinking(self) -> bool:
        """Whether the next text is reasoning."""

    @property
    def parse_text(self) -> Callable[[str], None]:
        """The function that parses the next text, which is not empty and contains no marker. Each piece of text and
        each marker may change the function."""

    def parse_marker(self, marker: str) -> None:
        """Parse a marker."""

    def end(self, cut: str = "") -> None:
        """End the answer: write the text that was held back. `cut`: text at the answer's end that begins a marker, but
        is not a whole one. It is dropped where the parser expects such a marker, as behind a call; anywhere else, it is
        text."""


class PartWriter:
    """Collects the text of one answer without markers, and the parts of this text."""

    __slots__ = ("_arguments", "_call", "_calls", "_chars", "_kind", "_parts", "_text", "failures")

    def __init__(self) -> None:
        self.failures: list[str] = []
        """The faults of the calls so far, but for the last one before `end_calls`."""
        self._arguments: list[str] = []  # of the last call
        self._text = ""
        self._parts: deque[Part] = deque()  # before the last one
        # The last part, which may grow; it may be empty.
        self._kind, self._call, self._chars = _CONTENT, NO_CALL, 0
        self._calls = 0

    def write_content(self, text: str) -> None:
        """Append text for the user."""
        self._add(_CONTENT, NO_CALL, text)

    def write_reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._add(_REASONING, NO_CALL, text)

    def write_call(self, name: str) -> None:
        """Begin a tool call; its arguments follow. The name is not empty. The call before is complete, so BAD_ARGUMENTS
        is added to `failures` if its arguments are not JSON."""
        self._check_arguments(last=False)
        self._calls += 1
        self._add(_NAME, self._calls - 1, _encodable(name))

    def write_arguments(self, text: str) -> None:
        """Append to the arguments of the last call, which also keeps them until they are checked. Lone surrogates
        become question marks."""
        self._arguments.append(text)
        if not text.isascii():
            text = _encodable(text)
        # The name of a call is a part between its arguments and those of the call before.
        if self._kind == _ARGUMENTS:
            self._text += text
            self._chars += len(text)
        else:
            self._add(_ARGUMENTS, self._calls - 1, text)

    def note_no_call(self) -> None:
        """Add NO_CALL_FOUND to `failures`, for text that began as a call and is content."""
        self.failures.append(NO_CALL_FOUND)

    def end_calls(self) -> None:
        """End the answer: check the last call."""
        self._check_arguments(last=True)

    def take_text(self) -> str:
        """Return the text that was appended since the last call."""
        text, self._text = self._text, ""
        return text

    def take_parts(self, chars: int) -> list[Part]:
        """Remove the parts of the next `chars` characters and return them. A part that goes on beyond them is split.
        Raises AssertionError if there are fewer characters."""
        parts = self._parts
        if not parts and 0 < chars <= self._chars:
            self._chars -= chars
            return [_part(self._kind, self._call, chars)]
        taken: list[Part] = []
        while parts and chars:
            part = parts.popleft()
            if part.chars > chars:
                parts.appendleft(part._replace(chars=part.chars - chars))
                part = part._replace(chars=chars)
            taken.append(part)
            chars -= part.chars
        if chars:
            require(chars <= self._chars, "The text has fewer characters than were asked for.")
            self._chars -= chars
            taken.append(_part(self._kind, self._call, chars))
        return taken

    def _check_arguments(self, *, last: bool) -> None:
        """Add to `failures` if the arguments of the last call are not JSON: with `last`, UNFINISHED if the answer ends
        before their value is complete, as when they are empty; else BAD_ARGUMENTS. Then forget these arguments. Does
        nothing before the first call."""
        if not self._calls:
            return
        text, self._arguments = "".join(self._arguments).strip(), []
        if not _is_json(text):
            cut = last and (not text or ValueScanner(text[0]).feed(text, 1) < 0)
            self.failures.append(UNFINISHED if cut else BAD_ARGUMENTS)

    def _add(self, kind: int, call: int, text: str) -> None:
        """Append text to the answer and to its current part, or begin a new part if its kind or call is another. Empty
        text begins no part."""
        self._text += text
        if kind == self._kind and call == self._call:
            self._chars += len(text)
            return
        if text:
            if self._chars:
                self._parts.append(Part(self._kind, self._call, self._chars))
            self._kind, self._call, self._chars = kind, call, len(text)


def _is_json(text: str) -> bool:
    """Whether a text is one JSON value, whose strings may contain control characters; NaN and Infinity count as values.
    False if it is nested too deeply for the parser."""
    try:
        DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a model's escapes can make and UTF-8 does not have."""
    return text.encode(errors="replace").decode()
