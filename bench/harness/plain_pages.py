"""Page sinks and page sources over a ring without an engine, for tests and benchmarks of KV connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire_worker.kv_transfer.ring import Ring


def ids(*values: int) -> NDArray[np.int32]:
    """Return page numbers in the form of a move."""
    return np.array(values, np.int32)


class PlainPageSink:
    """Implements PageSink: page n goes to slot n of the ring, and `on_land` is called."""

    def __init__(self, ring: Ring, on_land: Callable[[int], None] = lambda index: None, first_slot: int = 0) -> None:
        self._ring = ring
        self._on_land = on_land
        self._first_slot = first_slot
        self.received_pages = 0

    def next_buffer(self) -> memoryview:
        return self._ring.slot(self._first_slot + self.received_pages)

    def commit_page(self) -> None:
        self.received_pages += 1
        self._on_land(self.received_pages - 1)

    def flush(self) -> None:
        """Do nothing, because all pages have been reported already."""

    def bodies(self) -> list[bytes]:
        return [bytes(self._ring.slot(self._first_slot + index)) for index in range(self.received_pages)]


class PlainPageSource:
    """Implements PageSource: page n lies in slot n of the ring. `on_body` is called with the requested page, and may
    raise."""

    def __init__(self, ring: Ring, on_body: Callable[[int], None] = lambda index: None, first_slot: int = 0) -> None:
        self._ring = ring
        self._on_body = on_body
        self._first_slot = first_slot
        self.fd = ring.fd
        self.remaining: list[int] = []
        self.wanted: list[int] = []
        self.sent: list[int] = []

    def request_pages(self, indices: Sequence[int]) -> None:
        self.remaining, self.wanted = list(indices), list(indices)

    def is_ready(self, index: int) -> bool:
        return True

    def page_body(self, index: int) -> memoryview:
        self._on_body(index)
        return self._ring.slot(self._first_slot + index)

    def page_offset(self, index: int) -> int:
        return self._ring.offset_of(self._first_slot + index)

    def release_page(self, index: int) -> None:
        self.remaining.remove(index)
        self.sent.append(index)
