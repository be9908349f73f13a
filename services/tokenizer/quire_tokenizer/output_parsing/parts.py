"""Parts of an answer: each character of its text is content, reasoning, a tool's name or a call's arguments."""

from __future__ import annotations

import json
from collections import deque
from typing import NamedTuple, Protocol

from quire_common.finish import PartKind
from quire_tokenizer.output_parsing.json_values import ValueScanner

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


NO_CALL_FOUND, BAD_ARGUMENTS, UNFINISHED = "no_call", "bad_arguments", "unfinished"
"""The faults of a call: its text is no call and became content; its arguments are not JSON; the answer ends
within its arguments."""


class OutputParser(Protocol):
    """Splits one answer into parts, and writes them to a PartWriter. The parts depend only on the text and its markers,
    not on the pieces in which they come. A parser raises nothing, whatever a model writes."""

    @property
    def thinking(self) -> bool:
        """Whether the next text is reasoning."""

    def parse_text(self, text: str) -> None:
        """Parse text, which is not empty and contains no marker."""

    def parse_marker(self, marker: str) -> None:
        """Parse a marker."""

    def end(self) -> None:
        """End the answer: write the text that was held back."""


class PartWriter:
    """Collects the text of one answer without markers, and the parts of this text."""

    __slots__ = ("_arguments", "_calls", "_parts", "_texts", "failures")

    def __init__(self) -> None:
        self.failures: list[str] = []
        """Return the faults of the calls so far, but for the last one before `end_calls`."""
        self._arguments: list[str] = []  # of the last call
        self._texts: list[str] = []
        # Kind, call and characters of each part.
        self._parts: deque[list[int]] = deque()
        self._calls = 0

    def write_content(self, text: str) -> None:
        """Append text for the user."""
        self._add(_CONTENT, NO_CALL, text)

    def write_reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._add(_REASONING, NO_CALL, text)

    def write_call(self, name: str) -> None:
        """Begin a tool call; its arguments follow. The name is not empty."""
        self._check_arguments(last=False)
        self._calls += 1
        self._add(_NAME, self._calls - 1, _encodable(name))

    def write_arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        self._arguments.append(text)
        self._add(_ARGUMENTS, self._calls - 1, _encodable(text))

    def note_no_call(self) -> None:
        """Note text that began as a call and is content."""
        self.failures.append(NO_CALL_FOUND)

    def end_calls(self) -> None:
        """End the answer: check the last call."""
        self._check_arguments(last=True)

    def take_text(self) -> str:
        """Return the text that was appended since the last call."""
        texts = self._texts
        if not texts:
            return ""
        self._texts = []
        return texts[0] if len(texts) == 1 else "".join(texts)

    def take_parts(self, chars: int) -> list[Part]:
        """Remove the parts of the next `chars` characters and return them."""
        taken: list[Part] = []
        parts = self._parts
        while chars:
            kind, call, size = parts[0]
            if size > chars:
                parts[0][2], size = size - chars, chars
            else:
                del parts[0]
            taken.append(Part(kind, call, size))
            chars -= size
        return taken

    def _check_arguments(self, *, last: bool) -> None:
        """Note arguments that are not JSON."""
        if not self._calls:
            return
        text, self._arguments = "".join(self._arguments).strip(), []
        if not _is_json(text):
            cut = last and (not text or ValueScanner(text[0]).feed(text, 1) < 0)
            self.failures.append(UNFINISHED if cut else BAD_ARGUMENTS)

    def _add(self, kind: int, call: int, text: str) -> None:
        if not text:
            return
        self._texts.append(text)
        parts = self._parts
        if parts and parts[-1][0] == kind and parts[-1][1] == call:
            parts[-1][2] += len(text)
        else:
            parts.append([kind, call, len(text)])


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a model's escapes can make and UTF-8 does not have."""
    return text if text.isascii() else text.encode(errors="replace").decode()
