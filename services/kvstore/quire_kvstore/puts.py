"""Put: the pages of a put that is under way. They are being written, and lookups do not see them yet. Put does not
manage memory.

A page has one writer at a time, from `begin` to `end`. Put is not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument
from quire_common.pages import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_common.pages import PageKey, PageRun

MAX_FRAME_BYTES = 1 << 20


@dataclass
class Put:
    """The wanted pages of a run, by index. For each page: its place in memory, how much of it has come, its writer, and
    whether it matches its header."""

    run: PageRun
    page_bytes: int
    offsets: dict[int, int]
    received: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    intact: set[int] = field(default_factory=set)

    @property
    def framed_bytes(self) -> int:
        """Bytes of one page: header and body."""
        return HEADER_BYTES + self.page_bytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of all pages of the put."""
        return self.framed_bytes * len(self.offsets)

    def wanted_keys(self) -> Iterator[PageKey]:
        """The wanted pages' keys."""
        return (self.run.key(index) for index in self.offsets)

    def complete(self, index: int) -> bool:
        """Return whether all bytes of this page, header and body, have come."""
        return self.received.get(index, 0) == self.framed_bytes

    def restarts_under_writer(self, index: int, offset: int) -> bool:
        """Whether a sender starts a page again that another stream still writes. This happens if the sender's first
        connection has just broken and the store has not noticed yet."""
        return offset == 0 and index in self.busy

    def begin(self, index: int, offset: int, size: int) -> int:
        """Mark the page as being written, and return the offset in the store's memory for `size` bytes at `offset` of
        the framed page. Parts come in order; offset 0 starts the page again. Until `end`, none of the page counts as
        received. Raises InvalidArgument if the page is not wanted or has a writer, or the part is out of order or too
        long."""
        if index not in self.offsets:
            raise _bad(f"Page {index} is not wanted.", "Send the pages that BeginPut wants.")
        if index in self.busy:
            raise _bad(f"Page {index} is being written.", "Send each page on one stream.")
        expected = 0 if offset == 0 else self.received.get(index, 0)
        if offset != expected or offset + size > self.framed_bytes:
            raise _bad(
                f"A frame covers bytes {offset} to {offset + size} of page {index}; expected {expected} on, "
                f"up to {self.framed_bytes}.",
                "Send each page's frames in order, without gaps: header and body.",
            )
        self.busy.add(index)
        self.intact.discard(index)
        self.received[index] = 0  # what is half overwritten has not come
        return self.offsets[index] + offset

    def end(self, index: int, received: int) -> None:
        """Note that the write of a part has ended. Of the page, `received` bytes are there now, or 0 if the write
        failed."""
        self.busy.discard(index)
        self.received[index] = received


def _bad(message: str, fix: str) -> InvalidArgument:
    return InvalidArgument("BAD_PUT_FRAME", message, fix)
