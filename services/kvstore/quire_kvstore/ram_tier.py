"""Visible pages in memory: which there are, who pins them, which goes first. Knows nothing of leases or peers.

Least recently used goes first; a run of pages is touched from its end, so that a prefix loses its tail before its head.
A pinned page is never evicted, and counts as used when its last pin goes. Not thread-safe: the store's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_kvstore.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_common.pages import PageKey

MEDIUM = "ram"


@dataclass
class _Page:
    offset: int
    size: int
    pins: int = 0


class RamTier:
    """Pages by key, in an arena that holds pages under way too."""

    def __init__(self, capacity_bytes: int) -> None:
        self._arena = Arena(capacity_bytes)
        self._pages: dict[PageKey, _Page] = {}
        self._evictable: OrderedDict[PageKey, _Page] = OrderedDict()
        self._evictable_bytes = 0
        self._evicted: list[PageKey] = []
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._pages)

    @property
    def used_bytes(self) -> int:
        """Memory taken, by visible pages and by those under way."""
        return self._arena.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """All memory."""
        return self._arena.capacity_bytes

    def prefix(self, keys: Sequence[PageKey]) -> int:
        """How many of the keys, from the first on, are here."""
        for count, key in enumerate(keys):
            if key not in self._pages:
                return count
        return len(keys)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """The keys that are here have been used."""
        for key in reversed(keys):
            if key in self._evictable:
                self._evictable.move_to_end(key)

    def pin(self, keys: Sequence[PageKey]) -> None:
        """Keep these pages; raises KeyError for one that is not here."""
        for key in keys:
            page = self._pages[key]
            page.pins += 1
            if page.pins == 1:
                del self._evictable[key]
                self._evictable_bytes -= Arena.footprint(page.size)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Undo one `pin` of the same keys."""
        for key in reversed(keys):
            page = self._pages[key]
            page.pins -= 1
            if page.pins == 0:
                self._evictable[key] = page
                self._evictable_bytes += Arena.footprint(page.size)

    def can_reserve(self, size: int) -> bool:
        """Whether there is memory for a page, counting what may be evicted; fragments may still prove it wrong."""
        return Arena.footprint(size) <= self.capacity_bytes - self.used_bytes + self._evictable_bytes

    def reserve(self, size: int) -> int | None:
        """Memory for a page under way, evicting as needed; None where all the rest is pinned or under way."""
        while self.can_reserve(size):
            offset = self._arena.allocate(size)
            if offset is not None:
                return offset
            if not self._evictable:
                return None
            self._evict()
        return None

    def cancel(self, offset: int) -> None:
        """Give reserved memory back."""
        self._arena.free(offset)

    def reserved(self, offset: int, size: int) -> memoryview:
        """The memory of a page under way; the caller releases the view."""
        return self._arena.view(offset, size)

    def publish(self, key: PageKey, offset: int, size: int) -> None:
        """The page in reserved memory becomes visible, as the one used last."""
        assert key not in self._pages, "a page is published once"
        page = self._pages[key] = self._evictable[key] = _Page(offset, size)
        self._evictable_bytes += Arena.footprint(page.size)

    def size(self, key: PageKey) -> int:
        """Bytes of a page; raises KeyError."""
        return self._pages[key].size

    def read(self, key: PageKey, offset: int, size: int) -> bytes:
        """A copy of a part of a page; raises KeyError."""
        page = self._pages[key]
        start, end = min(offset, page.size), min(offset + size, page.size)
        with self._arena.view(page.offset + start, end - start) as view:
            return bytes(view)

    def take_evicted(self) -> list[PageKey]:
        """What was evicted since the last call: for those who watch."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()

    def check_integrity(self, pins: dict[PageKey, int], reserved: dict[int, int]) -> None:
        """The tier agrees with itself, with the leases' pins and with the puts' reservations (offset -> size)."""
        self._arena.check_integrity()
        for key, page in self._pages.items():
            assert page.pins == pins.get(key, 0), "pins are what the leases hold"
            assert (key in self._evictable) == (page.pins == 0), "exactly the unpinned are evictable"
        assert set(pins) <= set(self._pages), "a pinned page is here"
        assert set(self._evictable) <= set(self._pages)
        footprints = [Arena.footprint(p.size) for p in self._pages.values()]
        pending = [Arena.footprint(size) for size in reserved.values()]
        assert self.used_bytes == sum(footprints) + sum(pending), "memory belongs to a page or a put"
        assert self._evictable_bytes == sum(Arena.footprint(p.size) for p in self._evictable.values())
        offsets = [page.offset for page in self._pages.values()] + list(reserved)
        assert len(offsets) == len(set(offsets)), "no memory has two owners"

    def _evict(self) -> None:
        key, page = self._evictable.popitem(last=False)
        del self._pages[key]
        self._evictable_bytes -= Arena.footprint(page.size)
        self._arena.free(page.offset)
        self._evicted.append(key)
        self.evictions += 1
