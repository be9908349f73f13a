"""Makes the integer handles that identify sequences in messages. A handle is unique over all schedulers and attempts of
this router, so the columns of a scheduler's step go to the tokenizer unchanged."""

from __future__ import annotations

_LAST = 2**31 - 2


class HandleCounter:
    """Handles grow by two, and a handle is not used again for 2^30 attempts. So a late answer never matches another
    sequence.

    The lowest bit says that the sequence wants text offsets. So the router can read a tokenizer's answer even if the
    sequence has ended meanwhile.
    """

    __slots__ = ("_next",)

    def __init__(self, first: int = 2) -> None:
        self._next = first

    def next_handle(self, *, offsets: bool) -> int:
        """Return a new handle; its lowest bit says whether the sequence wants text offsets. Handles are positive int32
        numbers that are used again only after 2^30 calls."""
        handle = self._next
        self._next = handle + 2 if handle + 2 < _LAST else 2
        return handle | 1 if offsets else handle
