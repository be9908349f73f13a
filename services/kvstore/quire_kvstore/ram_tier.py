"""RamTier: the visible pages in memory, their pins, and their eviction. It knows nothing of leases or peers.

The eviction policy orders the pages. A run of pages is refreshed from its end, so that a prefix loses its tail before
its head. A pinned page is never evicted, and counts as used when its last pin is removed. A page that a lower tier is
copying is not evicted either, but keeps its place in the order. A dropped page is invisible to lookups at once, and its
memory is freed when it has neither a pin nor a reader. RamTier is not thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import require
from quire_kvstore.arena import Arena
from quire_kvstore.eviction import make_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_common.pages import PageKey

RAM = "ram"


@dataclass(eq=False, slots=True)
class RamPage:
    """A visible page, or a dropped page that still has a pin or a reader. `hits` counts the lookups that found it."""

    key: PageKey
    offset: int
    size: int
    pins: int = 0
    readers: int = 0
    hits: int = 0
    dropped: bool = False

    def add_hit(self) -> None:
        """Count another lookup that found the page."""
        self.hits += 1


class RamTier:
    """Pages by key, in an arena. The arena also holds the pages of puts and loads that are under way."""

    def __init__(self, capacity_bytes: int, policy: str = "lru") -> None:
        self._arena = Arena(capacity_bytes)
        self._pages: dict[PageKey, RamPage] = {}
        self._policy = make_policy(policy, capacity_bytes)
        self._evictable_bytes = 0
        self._being_read: dict[PageKey, RamPage] = {}
        self._dropped_pages: set[RamPage] = set()
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
        """Memory taken by visible pages, by dropped pages still in memory, and by pages under way."""
        return self._arena.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """All memory."""
        return self._arena.capacity_bytes

    @property
    def is_read(self) -> bool:
        """Whether a page is being copied (see `acquire_page`)."""
        return bool(self._being_read) or any(page.readers for page in self._dropped_pages)

    def get(self, key: PageKey) -> RamPage | None:
        """Return the visible page of this key; None if there is none. This does not count as a use."""
        return self._pages.get(key)

    def refresh(self, keys: Sequence[PageKey]) -> None:
        """Move these keys, if they are here and not pinned, to the end of the order of eviction (with `arc`, of the
        queue that each is in). The first of them is evicted last."""
        for key in reversed(keys):
            if key in self._pages:
                self._policy.refresh(key)

    def pin(self, pages: Sequence[RamPage]) -> None:
        """Add a pin to each of these pages. A page with a pin is not evicted. A first pin counts as a use: the page
        leaves the order of eviction, until `unpin` puts it at the end. For a dropped page, the pin is only counted."""
        for page in pages:
            page.pins += 1
            if page.pins == 1 and not page.dropped:
                self._policy.hold(page.key)
                self._evictable_bytes -= Arena.footprint(page.size)

    def unpin(self, pages: Sequence[RamPage]) -> None:
        """Undo one `pin` of the same pages. A page whose last pin goes can be evicted again and counts as used now, the
        first of `pages` last. If it was dropped, it is freed as soon as nobody reads it."""
        for page in reversed(pages):
            page.pins -= 1
            if page.pins == 0 and not page.dropped:
                self._policy.release(page.key)
                self._evictable_bytes += Arena.footprint(page.size)
            self._free_if_unused(page)

    def acquire_page(self, page: RamPage) -> None:
        """Keep a page's memory while the page is copied: a visible page is not evicted, and a dropped one is not freed.
        This does not count as a use."""
        page.readers += 1
        if not page.dropped:  # else its key may be that of a newer page, which others read
            self._being_read[page.key] = page

    def release_page(self, page: RamPage) -> None:
        """Undo one `acquire_page`. A page that was dropped is freed if it has no pin and no other reader."""
        page.readers -= 1
        if page.readers == 0 and self._being_read.get(page.key) is page:
            del self._being_read[page.key]
        self._free_if_unused(page)

    def drop_page(self, page: RamPage) -> None:
        """Make a page invisible to lookups and to eviction. Its memory is freed at once, or when the last pin and
        reader is gone. A drop is no eviction: `evictions` does not count it, and `take_evicted_keys` does not return
        its key. Does nothing if the page was dropped before."""
        if page.dropped:
            return
        page.dropped = True
        del self._pages[page.key]
        self._policy.discard(page.key)
        if page.pins == 0:
            self._evictable_bytes -= Arena.footprint(page.size)
        if self._being_read.get(page.key) is page:
            del self._being_read[page.key]
        self._dropped_pages.add(page)
        self._free_if_unused(page)

    def can_reserve(self, size: int) -> bool:
        """Whether there is memory for a page, if all unpinned pages are counted as free. `reserve` may still fail
        because of fragmentation, or because some of these pages are being copied."""
        return Arena.footprint(size) <= self.capacity_bytes - self.used_bytes + self._evictable_bytes

    def reserve(self, size: int) -> int | None:
        """Reserve memory for a page under way, and evict pages one by one until it fits. Returns the memory's offset.
        Returns None, without an eviction, if free memory and unpinned pages together are too small. Also returns None
        if the page does not fit after all evictions, because of fragmentation or pages being copied."""
        while self.can_reserve(size):
            offset = self._arena.allocate(size)
            if offset is not None:
                return offset
            if not self._evict():
                return None
        return None

    def cancel(self, offset: int) -> None:
        """Give reserved memory back."""
        self._arena.free(offset)

    def reserved(self, offset: int, size: int) -> memoryview:
        """The memory of a page under way; the caller releases the view."""
        return self._arena.view(offset, size)

    def publish(self, key: PageKey, offset: int, size: int, *, pinned: bool = False) -> RamPage:
        """Make the page in reserved memory visible, as the one used last, and return it. `pinned`: the page starts with
        one pin. Raises AssertionError if the key is visible already."""
        require(key not in self._pages, "a page is published once")
        page = self._pages[key] = RamPage(key, offset, size, pins=int(pinned))
        self._policy.add(key, Arena.footprint(size), held=pinned)
        if not pinned:
            self._evictable_bytes += Arena.footprint(size)
        return page

    def view(self, page: RamPage) -> memoryview:
        """The bytes of a page that is pinned or acquired; the caller releases the view."""
        return self._arena.view(page.offset, page.size)

    def generation(self, page: RamPage) -> int:
        """Return the number that distinguishes this page from all pages that later lie in its place; see Arena."""
        return self._arena.generation(page.offset)

    def populate(self, start: int, size: int) -> None:
        """Make `size` bytes of the memory, from byte `start` on, resident. Raises OSError if the kernel cannot do
        this."""
        self._arena.populate(start, size)

    def shareable_fd(self) -> int | None:
        """A descriptor of all memory, for other processes to read pages from; None where it cannot be sealed."""
        return self._arena.fd

    def take_evicted_keys(self) -> list[PageKey]:
        """Return the keys of the pages evicted since the last call, for the watchers."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """Give the memory back."""
        self._arena.close()

    def check_integrity(self, pins: dict[RamPage, int], reserved: dict[int, int]) -> None:
        """Raise AssertionError unless each page has the pins that the leases hold (`pins`), exactly the unpinned pages
        are evictable (also while they are being copied), exactly the visible pages with a reader are listed as being
        read, and each dropped page still in memory has a pin or a reader. All used memory must belong to one page or be
        reserved by others (`reserved`: offset -> size), and the byte counts must be right."""
        self._arena.check_integrity()
        alive = set(self._pages.values())
        evictable = list(self._policy)
        require(len(evictable) == len(set(evictable)), "a page waits once")
        for key, page in self._pages.items():
            require(page.key == key and not page.dropped, "a page has another key, or was dropped")
            require(page.pins == pins.get(page, 0), "pins are what the leases hold")
            require((self._being_read.get(key) is page) == (page.readers > 0), "a page with readers is being read")
        require(self._being_read.keys() <= self._pages.keys(), "only visible pages are noted as being read")
        unpinned = {key for key, page in self._pages.items() if not page.pins}
        require(set(evictable) == unpinned, "exactly the unpinned pages can be evicted")
        for page in self._dropped_pages:
            require(page.dropped and page.pins == pins.get(page, 0), "pins are what the leases hold")
            require(page.pins > 0 or page.readers > 0, "nobody reads it: it should be gone")
        require(set(pins) <= alive | self._dropped_pages, "a pinned page has its memory")
        footprints = [Arena.footprint(page.size) for page in alive | self._dropped_pages]
        pending = [Arena.footprint(size) for size in reserved.values()]
        require(self.used_bytes == sum(footprints) + sum(pending), "memory belongs to a page or is reserved")
        evictable_bytes = sum(Arena.footprint(self._pages[key].size) for key in evictable)
        require(self._evictable_bytes == evictable_bytes, "evictable bytes were miscounted")
        offsets = [page.offset for page in alive | self._dropped_pages] + list(reserved)
        require(len(offsets) == len(set(offsets)), "no memory has two owners")

    def _free_if_unused(self, page: RamPage) -> None:
        """Free the memory of a dropped page that has no pin and no reader. Does nothing for other pages."""
        if page.dropped and not page.pins and not page.readers and page in self._dropped_pages:
            self._dropped_pages.remove(page)
            self._arena.free(page.offset)

    def _evict(self) -> bool:
        """Evict the page that the policy chooses among those that nobody pins or reads, count it, and note its key for
        `take_evicted_keys`. Returns False if there is none."""
        key = self._policy.evict(self._being_read)
        if key is None:
            return False
        page = self._pages.pop(key)
        self._evictable_bytes -= Arena.footprint(page.size)
        self._arena.free(page.offset)
        self._evicted.append(key)
        self.evictions += 1
        return True
