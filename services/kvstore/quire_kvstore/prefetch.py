"""Prefetch: the pages of one lookup as they arrive. PageLoad: one load that brings a page. Neither knows the tiers that
pages come from.

Not thread-safe: the store's lock guards both, and `changed` belongs to that lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.errors import Internal
from quire_kvstore.tiers.backend import PageJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.ram_tier import RamPage

# Loads of one lookup at once: enough to keep every thread busy, few enough that a cold lookup costs little.
WINDOW = 64


class Prefetch:
    """The pages of a run by index, up to the first page that no tier has or that cannot be loaded. The pages stay
    pinned. `stamp_ns` is the time of the lookup (`time.time_ns()`); `outstanding` counts its loads under way, at most
    WINDOW."""

    def __init__(self, keys: Sequence[PageKey], lock: threading.Lock, stamp_ns: int) -> None:
        self.keys = keys
        self.stamp_ns = stamp_ns
        self.changed = threading.Condition(lock)
        self.cursor = 0
        """The first index that has not been looked at."""
        self.outstanding = 0
        self.closed = False
        self.pages: dict[int, RamPage] = {}
        self.tier_names: dict[int, str] = {}
        self.ready = 0
        """How many pages are here, from the first on."""
        self._limit = len(keys)

    @property
    def has_next(self) -> bool:
        """Whether the page at the cursor can be looked at now."""
        return not self.closed and self.cursor < self._limit and self.outstanding < WINDOW

    @property
    def done(self) -> bool:
        """Whether further waiting brings no more pages."""
        return self.ready >= self._limit

    def advance(self, *, loading: bool) -> None:
        """Move the cursor past its page, which was looked at. `loading`: a load will bring that page."""
        self.cursor += 1
        self.outstanding += loading

    def finish_load(self) -> None:
        """Note that a load for this lookup has ended."""
        self.outstanding -= 1

    def wants(self, index: int) -> bool:
        """Whether the lookup can still use the page at this index."""
        return not self.closed and index < self._limit

    def add_page(self, index: int, page: RamPage, tier_name: str) -> None:
        """Add the page at this index, which is here and pinned for this lookup, with the tier that it came from. Counts
        it in `ready` once all pages before it are here, and wakes the lookup."""
        self.pages[index] = page
        self.tier_names[index] = tier_name
        while self.ready in self.pages:
            self.ready += 1
        self.changed.notify_all()

    def truncate(self, index: int) -> None:
        """End the prefix before this index, since no tier has its page or it cannot be loaded, and wake the lookup."""
        self._limit = min(self._limit, index)
        self.changed.notify_all()

    def close(self) -> tuple[list[RamPage], list[RamPage]]:
        """End the lookup. Returns the pages of its complete prefix, and the pages beyond, which are to be unpinned."""
        self.closed = True
        beyond = [page for index, page in self.pages.items() if index >= self.ready]
        return [self.pages[index] for index in range(self.ready)], beyond


@dataclass(eq=False)
class PageLoad(PageJob):
    """A load that brings a page into RAM, and the lookups that wait for it. `parent` is the hash of the page before it.
    While a tier reads the page, `view` is its memory, at `offset`."""

    parent: bytes = b""
    tier: int = 0
    waiters: list[tuple[Prefetch, int]] = field(default_factory=list)
    offset: int = 0
    view: memoryview | None = None

    def wanted(self) -> bool:
        """Whether any lookup can still use the page."""
        return any(prefetch.wants(index) for prefetch, index in self.waiters)

    def use_buffer(self, offset: int, view: memoryview) -> None:
        """Record the memory that the page is read into."""
        self.offset, self.view = offset, view

    def go_to_tier(self, tier: int) -> None:
        """Record the tier that is asked for the page."""
        self.tier = tier

    def release_buffer(self) -> tuple[int, int]:
        """Release the view of the memory that the page is read into. Returns the memory's offset and size; the caller
        frees or publishes it. Raises Internal if there is no such memory."""
        if self.view is None:
            raise Internal("INTEGRITY", "A page came without memory.", "Report it with the kvstore's log.")
        size = len(self.view)
        self.view.release()
        self.view = None
        return self.offset, size
