"""TierManager: moves pages between RAM and the tiers below it, up for lookups and down for safe keeping.

Up: a lookup walks its keys. Pages in RAM are pinned at once. Pages that a lower tier may have are loaded, up to a
number of loads at a time (the window). A page that several lookups want is loaded once.

Down: a page is copied to each tier, either when it is stored or when lookups have found it often enough. It stays in
RAM too. Watchers are told that this instance has a page while the page is in RAM or in a local tier.

Methods are called under the store's lock, except for those of TierCallbacks, which tiers call without it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, cast

from quire_common.errors import require
from quire_common.telemetry.logs import get_logger
from quire_kvstore.prefetch import PageLoad, Prefetch
from quire_kvstore.ram_tier import RAM

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from quire_common.pages import PageKey
    from quire_kvstore.page_feed import PageFeed
    from quire_kvstore.ram_tier import RamPage, RamTier
    from quire_kvstore.tiers.backend import PageJob
    from quire_kvstore.tiers.tier import Tier

log = get_logger(__name__)


class TierManager:
    """All tiers of one store. `max_waiting`: how many lookups may wait for loads at once. `damaged_pages` counts pages
    that went bad in RAM."""

    def __init__(
        self, lock: threading.Lock, ram: RamTier, feed: PageFeed, tiers: Sequence[Tier], max_waiting: int
    ) -> None:
        self._lock = lock
        self._ram = ram
        self._feed = feed
        self._tiers = tiers
        self._max_waiting = max_waiting
        self._waiting = 0
        self._loading: dict[PageKey, PageLoad] = {}
        self._load_buffers: dict[int, int] = {}
        self.damaged_pages = 0

    def fetch_prefix(self, keys: Sequence[PageKey], wait_s: float) -> Prefetch:
        """Pin the prefix of the keys that is in RAM, and load the pages that follow from lower tiers. Blocks up to
        `wait_s`, with the store's lock released, until the prefix is complete; what came late is not in it. With
        `wait_s` 0 or less, or if `max_waiting` lookups wait already, only RAM is asked. The caller ends the lookup with
        `end_prefetch`."""
        prefetch = Prefetch(keys, self._lock, time.time_ns())
        self._start_loads(prefetch, load_missing=wait_s > 0 and self._waiting < self._max_waiting)
        if not prefetch.done:
            self._waiting += 1
            prefetch.changed.wait_for(lambda: prefetch.done, wait_s)
            self._waiting -= 1
        return prefetch

    def end_prefetch(self, prefetch: Prefetch) -> list[RamPage]:
        """End a lookup. Returns the pages of its complete prefix, which stay pinned; pages beyond a gap are unpinned.
        Each returned page counts one more hit, and every tier is told of its use (Redis ignores that). A page that now
        has exactly `write_at` hits is offered to that tier for writing, unless it is a local tier that has the page."""
        pages, beyond = prefetch.close()
        self._ram.unpin(beyond)
        for page in pages:
            page.add_hit()
        for tier in self._tiers:
            tier.touch(prefetch.keys[: len(pages)])
            self._offer_pages(tier, [page.key for page in pages if page.hits == tier.write_at])
        return pages

    def stored(self, keys: Sequence[PageKey], parents: Sequence[bytes]) -> None:
        """Tell watchers that these pages are in RAM, and offer them to the write-through tiers. `parents[i]` is the
        hash of the page before `keys[i]` in its run."""
        self._feed.publish(keys, parents)
        for tier in self._tiers:
            if tier.write_at == 0:
                self._offer_pages(tier, keys)

    def drop_damaged(self, page: RamPage) -> None:
        """Make a damaged page in RAM invisible to lookups, count it in `damaged_pages`, and tell watchers, unless a
        local tier has the page. Does nothing if the page was dropped before."""
        if not page.dropped:
            self._ram.drop_page(page)
            self.damaged_pages += 1
            self._publish_removed([page.key])

    def has_page(self, key: PageKey) -> bool:
        """Whether this instance holds a page, as far as is known without looking."""
        return key in self._ram or self._in_local_tier(key)

    def held_keys(self) -> dict[str, list[PageKey]]:
        """Return the keys of the pages that this instance holds, by tier name. Under a local tier below RAM are only
        pages that are not in RAM. Shared tiers such as Redis are left out."""
        found = {RAM: list(self._ram)}
        for tier in self._tiers:
            if tier.backend.local:
                found[tier.backend.name] = [key for key in tier.backend.held_keys() if key not in self._ram]
        return found

    def publish_evictions(self) -> None:
        """Tell watchers of the pages that RAM has evicted since the last call, except those that a local tier still
        has."""
        self._publish_removed(self._ram.take_evicted_keys())

    def load_buffers(self) -> dict[int, int]:
        """Return the RAM that loads are being read into, as sizes by offset."""
        return self._load_buffers

    def check_integrity(self) -> None:
        """Raise AssertionError unless no lookup waits, and each load under way is listed under its own key and has a
        lookup that asked for it, which may have ended."""
        require(not self._waiting, "a lookup is under way")
        for key, load in self._loading.items():
            require(load.key == key and bool(load.waiters), "a load has somebody who asked for it")

    # TierCallbacks: called by the tiers' threads.

    def allocate_buffer(self, job: PageJob, size: int) -> memoryview | None:
        """Reserve RAM for a page that a tier is about to read, evicting other pages as needed; watchers are told of
        evictions. Returns None if the load has ended with this call: it fails if no lookup wants the page any more or
        there is no room. If a put has brought the page meanwhile, that page completes the load."""
        load = cast("PageLoad", job)
        with self._lock:
            if not load.wanted():
                self._fail_load(load)
                return None
            if (page := self._ram.get(load.key)) is not None:  # a put has brought it meanwhile
                self._complete_load(load, page)
                return None
            offset = self._ram.reserve(size)
            self.publish_evictions()
            if offset is None:
                self._fail_load(load)
                return None
            self._load_buffers[offset] = size
            view = self._ram.reserved(offset, size)
            load.use_buffer(offset, view)
            return view

    def on_page_read(self, job: PageJob) -> None:
        """Publish in RAM the page that was read, and complete its load. Watchers are told, unless a local tier had the
        page, and faster write-through tiers are offered it. If a put has brought the page meanwhile, that page
        completes the load, and the buffer is freed."""
        load = cast("PageLoad", job)
        with self._lock:
            offset, size = load.release_buffer()
            del self._load_buffers[offset]
            if (page := self._ram.get(load.key)) is not None:
                self._ram.cancel(offset)
                self._complete_load(load, page)
                return
            known = self._in_local_tier(load.key)
            page = self._ram.publish(load.key, offset, size, pinned=True)
            self._complete_load(load, page)
            self._ram.unpin([page])
            if not known:
                self._feed.publish([load.key], [load.parent])
            for tier in self._tiers[: load.tier]:
                if tier.write_at == 0:
                    self._offer_pages(tier, [load.key])

    def on_page_missed(self, job: PageJob) -> None:
        """Go on after a tier did not have the page of a load: free the memory that was reserved for it, if any, and ask
        the next slower tier that may have the page. If there is none, or no lookup wants the page any more, the load
        fails."""
        load = cast("PageLoad", job)
        with self._lock:
            if load.view is not None:
                offset, _ = load.release_buffer()
                del self._load_buffers[offset]
                self._ram.cancel(offset)
            self._try_next_tier(load)

    @contextlib.contextmanager
    def borrow_page(self, key: PageKey) -> Iterator[memoryview | None]:
        """Context manager: yield the framed bytes of a page in RAM, which is not evicted meanwhile, or None if the page
        is not there. This does not count as a use."""
        with self._lock:
            page = self._ram.get(key)
            if page is not None:
                self._ram.acquire_page(page)
        if page is None:
            yield None
            return
        try:
            with self._ram.view(page) as view:
                yield view
        finally:
            with self._lock:
                self._ram.release_page(page)

    def on_pages_removed(self, keys: Sequence[PageKey]) -> None:
        """Tell watchers of pages that a tier has removed, except those that RAM or a local tier still has. Takes the
        lock."""
        with self._lock:
            self._publish_removed(keys)

    def on_pages_found(self) -> None:
        """Make every watcher take a new snapshot: there may be more pages than a change can tell."""
        with self._lock:
            self._feed.force_snapshots()

    def _start_loads(self, prefetch: Prefetch, *, load_missing: bool = True) -> None:
        """Process the lookup's next keys, as many as its window allows: pin pages in RAM, and share loads that are
        under way. Other pages are requested from the fastest tier that may have them; loads that its read queue
        refuses, since it is full or closed, go to the next tier. The prefix ends at a page that no tier may have or,
        without `load_missing`, at a page that is not in RAM, even if it is being loaded."""
        loads: dict[int, list[PageLoad]] = {}
        while prefetch.has_next:
            index = prefetch.cursor
            key, loading = prefetch.keys[index], True
            if (page := self._ram.get(key)) is not None:
                self._ram.pin([page])
                prefetch.add_page(index, page, RAM)
                loading = False
            elif not load_missing:
                prefetch.truncate(index)
                return
            elif (load := self._loading.get(key)) is not None:
                load.waiters.append((prefetch, index))
            elif (number := self._find_tier(key, 0)) is not None:
                parent = prefetch.keys[index - 1].hash if index else b""
                load = PageLoad(key, prefetch.stamp_ns - index, parent, number, [(prefetch, index)])
                self._loading[key] = load
                loads.setdefault(number, []).append(load)
            else:
                prefetch.truncate(index)
                break
            prefetch.advance(loading=loading)
        for number, of_tier in loads.items():
            for refused in self._tiers[number].request_reads(of_tier):
                self._try_next_tier(cast("PageLoad", refused))

    def _try_next_tier(self, load: PageLoad) -> None:
        """Request the page from the next slower tier that may have it and whose read queue has room. The load fails if
        there is no such tier, or no lookup wants the page any more."""
        while load.wanted():
            number = self._find_tier(load.key, load.tier + 1)
            if number is None:
                break
            load.go_to_tier(number)
            if not self._tiers[number].request_reads([load]):
                return
        self._fail_load(load)

    def _fail_load(self, load: PageLoad) -> None:
        """End a load without a page. The lookups that wait for it get a prefix that ends before the page."""
        if self._loading.get(load.key) is load:
            del self._loading[load.key]
        for prefetch, index in load.waiters:
            prefetch.finish_load()
            prefetch.truncate(index)
        load.waiters.clear()

    def _complete_load(self, load: PageLoad, page: RamPage) -> None:
        """End a load: pin its page for each lookup that still wants it, and request the next pages of these lookups.
        The page counts as found in the tier that was asked, also if a put brought it."""
        del self._loading[load.key]
        tier_name = self._tiers[load.tier].backend.name
        for prefetch, index in load.waiters:
            prefetch.finish_load()
            if prefetch.wants(index):
                self._ram.pin([page])
                prefetch.add_page(index, page, tier_name)
                self._start_loads(prefetch)
        load.waiters.clear()

    def _find_tier(self, key: PageKey, first: int) -> int | None:
        """Return the number of the fastest tier, from number `first` on, that may have the page; None if none may."""
        for number in range(first, len(self._tiers)):
            if self._tiers[number].may_have(key):
                return number
        return None

    def _in_local_tier(self, key: PageKey) -> bool:
        """Whether a local tier below RAM has the page, as far as is known without looking."""
        return any(tier.backend.local and tier.may_have(key) for tier in self._tiers)

    def _offer_pages(self, tier: Tier, keys: Sequence[PageKey]) -> None:
        """Queue the pages for writing to the tier. A local tier is not offered pages that it has; a shared tier is
        offered all, and finds out by itself which ones it has."""
        missing = [key for key in keys if not (tier.backend.local and tier.may_have(key))]
        if missing:
            tier.offer_pages(missing)

    def _publish_removed(self, keys: Sequence[PageKey]) -> None:
        """Tell watchers that these pages are gone, except those that RAM or a local tier still has."""
        self._feed.publish(removed=[key for key in keys if not self.has_page(key)])
