"""Integer handles: unique over all schedulers and attempts of the router, so that a step's columns pass untouched."""

from __future__ import annotations

_LAST = 2**31 - 2


class HandleCounter:
    """Handles grow by two and are not used again for 2^30 attempts: a late answer finds nobody.

    The lowest bit says that the sequence wants text offsets, so that a tokenizer's answer can be read even where the
    sequence has gone in the meantime.
    """

    __slots__ = ("_next",)

    def __init__(self, first: int = 2) -> None:
        self._next = first

    def next_handle(self, *, offsets: bool) -> int:
        """Return a new handle, whose lowest bit is `offsets`."""
        handle = self._next
        self._next = handle + 2 if handle + 2 < _LAST else 2
        return handle | 1 if offsets else handle
