"""Removes white space at the start and end of a text, which models put around their markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TrimmedWriter:
    """Holds white space back until more text follows. `drop` discards the white space, `release` writes it."""

    __slots__ = ("_held", "_started", "_write")

    def __init__(self, write: Callable[[str], None], *, strip_start: bool = True) -> None:
        self._write = write
        self._held = ""
        self._started = not strip_start

    @property
    def drops_space(self) -> bool:
        """Whether no text has come, but for white space, since the last `drop`; with `strip_start`, also since the
        text's start. Then white space is dropped."""
        return not self._started

    def write(self, text: str) -> None:
        """Append text. White space at its end is held back until other text follows. White space at the text's start is
        dropped if `strip_start` is on; after `drop`, it is dropped in any case."""
        if self._started and not self._held and text and not text[-1].isspace():
            self._write(text)
            return
        if not self._started:
            text = text.lstrip()
            if not text:
                return
            self._started = True
        kept = text.rstrip()
        if not kept:
            self._held += text
            return
        self._write(self._held + kept)
        self._held = text[len(kept) :]

    def drop(self) -> None:
        """Discard white space before a marker, and at the start of the text behind the marker."""
        self._held = ""
        self._started = False

    def release(self) -> None:
        """End the text: write the white space that was held back."""
        held, self._held = self._held, ""
        if held:
            self._write(held)
