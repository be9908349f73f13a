"""The store: pages, the leases that hold them, and puts in two phases. All methods may be called from any thread.

One lock guards everything, and is never held for long. The thread that stores or reads a page copies its bytes and
computes its checksum without the lock.

    BeginPut   reserves memory; the pages are invisible, and other puts skip them meanwhile (put_manager.py)
    CommitPut  makes the complete and intact pages visible, and frees the memory of the others
    a lookup   pins the pages in memory, and waits some time for pages of lower tiers (tier_manager.py)
    the end of a lease, by release or by time, unpins the pages of a lookup, and drops an uncommitted put
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire_common.errors import InvalidArgument, NotFound, TooLarge, require
from quire_common.pages import authenticate_page, repair_mac, split_page
from quire_kvstore.leases import Lease, LeaseTable
from quire_kvstore.page_feed import PageFeed
from quire_kvstore.put_manager import PageBuffer, PutManager, is_intact
from quire_kvstore.puts import MAX_FRAME_BYTES, Put
from quire_kvstore.ram_tier import RAM, RamPage, RamTier
from quire_kvstore.store_stats import LookupCounts, StoreCounts, StoreStats, TierStats
from quire_kvstore.tier_manager import TierManager
from quire_kvstore.tiers.backend import TierFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageKey, PageRun
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.page_feed import Watcher
    from quire_kvstore.tiers.tier import Tier

_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True)
class PinnedPages:
    """The pages that a lookup's lease holds. `slowest_tier` is the slowest of the tiers from which they came."""

    pages: tuple[RamPage, ...]
    slowest_tier: str


class PutOffer(NamedTuple):
    """The indices of the wanted pages, and the lease under which to send them; there is no lease if none is wanted.
    `admitted` counts the pages, from the first on, that the store has, is receiving or wants; if they are fewer than
    the run has, there was no room for the next page, or the store drains."""

    wanted: list[int]
    lease: Lease[PinnedPages | Put] | None
    admitted: int


class PageStore:
    """`tiers` are the tiers below RAM, the fastest first; they run from `start` to `close`. `mac`, if given, makes and
    verifies the MACs of pages that travel over a network."""

    def __init__(
        self,
        config: KvstoreConfig,
        clock: Callable[[], float] = time.monotonic,
        tiers: Sequence[Tier] = (),
        mac: PageMac | None = None,
    ) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._ram = RamTier(config.ram_bytes, config.ram_policy)
        self._leases: LeaseTable[PinnedPages | Put] = LeaseTable(
            config.max_leases, config.default_lease_ms, config.max_lease_ms, clock
        )
        self._feed = PageFeed(config.max_watchers, config.watch_queue)
        self._tiers = tiers
        self._tier_manager = TierManager(self._lock, self._ram, self._feed, tiers, config.max_prefetches)
        self._counts = StoreCounts()
        self._lookup_counts = LookupCounts((RAM, *(tier.backend.name for tier in tiers)))
        self._mac = mac
        self._puts = PutManager(config, self._lock, self._ram, self._tier_manager, self._counts, self._find_put, mac)
        self._draining = False

    @property
    def watched(self) -> bool:
        """Whether watchers learn of all pages that lookups can find. They do not learn of pages that other instances
        put into a shared tier."""
        return all(tier.backend.local for tier in self._tiers)

    def start(self) -> None:
        """Open the tiers below RAM. The store works without a tier that cannot be opened."""
        for tier in self._tiers:
            tier.start(self._tier_manager)

    def lookup(
        self, run: PageRun, lease_ms: int, *, pin: bool, wait_s: float | None = None
    ) -> tuple[int, Lease[PinnedPages | Put] | None]:
        """Pin the longest prefix of the run that is here, waiting up to `wait_s` (None: as configured) for pages of
        lower tiers. With a wait of 0, or if `max_prefetches` lookups wait already, only RAM is asked. Returns the
        prefix's length in pages and the lease that holds it (None if nothing was found). `lease_ms`: the lease's life;
        0 is the default, and the configuration has a maximum. Without `pin`, only count the leading pages that RAM or a
        local tier holds: no lease, no wait, no count of hits. While the store drains, nothing is found. Leases that
        have expired are ended first. Raises TooLarge for more than `max_keys` pages, InvalidArgument for malformed keys
        and, after the wait, Overloaded if there are too many leases."""
        keys = self._keys(run)
        if wait_s is None:
            wait_s = self._config.prefetch_ms / 1000
        with self._lock:
            self._expire()
            if self._draining:
                return 0, None
            if not pin:
                return next((i for i, key in enumerate(keys) if not self._tier_manager.has_page(key)), len(keys)), None
            prefetch = self._tier_manager.fetch_prefix(keys, wait_s)
            held = self._tier_manager.end_prefetch(prefetch)
            lease = None
            try:
                if held and not self._draining:
                    lease = self._leases.grant(
                        PinnedPages(tuple(held), self._lookup_counts.slowest_tier(prefetch, len(held))), lease_ms
                    )
            finally:
                if lease is None:
                    self._ram.unpin(held)
            found = len(held) if lease else 0
            self._lookup_counts.count(prefetch, found)
            self._counts.add_lookup(found, len(keys))
            return found, lease

    def read(self, lease_id: bytes, index: int, offset: int, size: int) -> tuple[bytes, bool]:
        """Return a copy of `size` bytes, from `offset` on, of a framed pinned page, and whether the page ends there.
        The page is verified when its first part is read. The caller has checked `index` (see `readable_indices`).
        Raises NotFound if the lease has ended, or if the page is damaged."""
        if offset == 0 and not self.verify_page(lease_id, index):
            raise NotFound("PAGE_LOST", "A page of the lease went bad in memory.", "Treat it as a miss.")
        with self.sendable_page(lease_id, index) as framed:
            return bytes(framed[offset : offset + size]), offset + size >= len(framed)

    @contextlib.contextmanager
    def sendable_page(self, lease_id: bytes, index: int) -> Iterator[memoryview]:
        """Context manager: yield the framed bytes of a pinned page that is to go over a network, after adding its MAC
        if there is a MAC key and the page has no MAC under it. The bytes stay in place meanwhile. Raises NotFound if
        the lease is unknown, has expired or is a put's."""
        with self.page_view(lease_id, index) as framed:
            if self._mac is not None:
                authenticate_page(*split_page(framed), self._mac)
            yield framed

    @contextlib.contextmanager
    def page_view(self, lease_id: bytes, index: int) -> Iterator[memoryview]:
        """Context manager: yield the framed bytes of a pinned page, which stay in place meanwhile, even if the lease
        ends. Raises NotFound if the lease is unknown, has expired or is a put's."""
        with self._lock:
            page = self._find_pinned(lease_id).pages[index]
            self._ram.acquire_page(page)
        try:
            with self._ram.view(page) as framed:
                yield framed
        finally:
            with self._lock:
                self._ram.release_page(page)

    def verify_page(self, lease_id: bytes, index: int) -> bool:
        """Return whether a pinned page matches its key and checksum. False also for a page that was dropped before. A
        damaged page is dropped and counted, and watchers are told unless a local tier has it. If only its MAC is wrong,
        the MAC is computed again. Raises NotFound if the lease is unknown, has expired or is a put's."""
        with self._lock:
            page = self._find_pinned(lease_id).pages[index]
        with self.page_view(lease_id, index) as framed:
            intact = not page.dropped and is_intact(framed, page.key)
            if intact and self._mac is not None:
                repair_mac(*split_page(framed), self._mac)
        if not intact:
            with self._lock:
                self._tier_manager.drop_damaged(page)
        return intact

    def page_locations(self, lease_id: bytes) -> tuple[Lease[PinnedPages | Put], list[int], list[int]]:
        """Return a lookup's lease, and the arena offset and the generation of each of its pages. Raises NotFound if the
        lease is unknown, has expired or is a put's."""
        with self._lock:
            pages = self._find_pinned(lease_id).pages
            generations = [self._ram.generation(page) for page in pages]
            return self._leases.find(lease_id), [page.offset for page in pages], generations

    def readable_indices(self, lease_id: bytes, indices: Sequence[int]) -> Sequence[int]:
        """Check the indices of a lease's pages that a read asks for, and return them; if none is given, return those of
        all the lease's pages. Raises NotFound if the lease is unknown, has expired or is a put's, and InvalidArgument
        for an index out of range."""
        with self._lock:
            count = len(self._find_pinned(lease_id).pages)
        for index in indices:
            if not 0 <= index < count:
                raise InvalidArgument(
                    "BAD_PAGE_INDEX", f"Page {index} was asked for, the lease has {count}.", "Ask for pages found."
                )
        return indices or range(count)

    def populate(self, start: int, size: int) -> bool:
        """Make `size` bytes of the memory, from byte `start` on and to its end at most, resident now instead of at
        their first use. Returns False if `start` is past the end, or the kernel cannot do it."""
        if start >= self._config.ram_bytes:
            return False
        try:
            self._ram.populate(start, size)
        except OSError:
            return False
        return True

    def shareable_fd(self) -> int | None:
        """Return the descriptor by which other processes can map the memory to read pages; None if the kernel cannot
        seal it. The store keeps the descriptor and closes it."""
        return self._ram.shareable_fd()

    def begin_put(self, run: PageRun, page_bytes: int, lease_ms: int) -> PutOffer:
        """Reserve memory for those of the run's pages that are wanted, and grant a lease on them. A page is not wanted
        if RAM or a local tier has it, if another put brings it, or if it or an earlier one gets no room: evicting pages
        does not help, or the page would exceed `max_pending_bytes` while other pages are pending. Pages without room
        count as refused. While the store drains, none is wanted. Without a wanted page there is no lease.
        `page_bytes`: the size of one page's body. `lease_ms` is as for `lookup`. Raises InvalidArgument for a malformed
        key or a page named twice, TooLarge for too many pages or a bad page size, and Overloaded if there are too many
        leases."""
        keys = self._keys(run)
        with self._lock:
            self._expire()
            missing = self._puts.missing(keys, page_bytes)
            if not missing:
                return PutOffer([], None, len(run))
            if self._draining:
                return PutOffer([], None, missing[0])
            self._leases.require_room()
            put = self._puts.begin(run, page_bytes, missing)
            if put is None:
                return PutOffer([], None, missing[0])
            wanted = list(put.offsets)
            admitted = missing[len(wanted)] if len(wanted) < len(missing) else len(run)
            return PutOffer(wanted, self._leases.grant(put, lease_ms), admitted)

    def write(self, lease_id: bytes, index: int, offset: int, data: Buffer) -> None:
        """Copy one part of a put's page, of 1 MiB at most, into its memory at `offset`; the page's header comes first.
        Raises NotFound if the lease is unknown, has expired or is a lookup's. Waits as `page_buffer` does. Raises
        InvalidArgument for a part that is longer or exceeds the page, a part that is neither the first nor the next one
        of its page, and a page that is not wanted or is being written."""
        part = memoryview(data)
        if len(part) > MAX_FRAME_BYTES:
            message = f"A frame has {len(part)} bytes, more than {MAX_FRAME_BYTES}."
            raise InvalidArgument("BAD_PUT_FRAME", message, "Send frames of at most 1 MiB.")
        with self.page_buffer(lease_id, index, offset, len(part)) as buffer:
            buffer.view[:] = part

    def page_buffer(
        self, lease_id: bytes, index: int, offset: int = 0, size: int | None = None
    ) -> contextlib.AbstractContextManager[PageBuffer]:
        """Context manager: yield memory for a part of a put's page, which the caller fills. See
        PutManager.page_buffer."""
        return self._puts.page_buffer(lease_id, index, offset, size)

    def complete_pages(self, lease_id: bytes) -> int:
        """Return how many of a put's pages have come whole; they may be damaged. Raises NotFound if the lease is
        unknown, has expired or is a lookup's."""
        with self._lock:
            put = self._find_put(lease_id)
            return sum(put.complete(index) for index in put.offsets)

    def commit(self, lease_id: bytes) -> tuple[int, int]:
        """End a put and its lease: complete and intact pages become visible, the others are dropped. Returns the number
        of visible pages and the number of dropped ones; pages that the put did not want are in neither. Raises NotFound
        if the lease is unknown, has expired or is a lookup's."""
        with self._lock:
            put = self._find_put(lease_id)
            self._leases.end(lease_id)
            stored = self._puts.finish(put, publish=True)
            return stored, len(put.offsets) - stored

    def lease_key_of(self, handle: bytes) -> tuple[bytes, bytes] | None:
        """Return the name and the key of the lease with this handle; None if there is none or it has expired (see
        quire_common.kv_data)."""
        with self._lock:
            lease = self._leases.by_handle(handle)
            return None if lease is None else (lease.id, lease.key)

    def renew(self, lease_id: bytes, lease_ms: int) -> int:
        """Prolong a lease to `lease_ms` from now (0: the default), but no longer than the configuration allows; a lease
        is never shortened. Returns its life from now on, in ms. Raises NotFound if the lease is unknown or has
        expired."""
        with self._lock:
            return self._leases.renew(lease_id, lease_ms)

    def release(self, lease_ids: Sequence[bytes]) -> int:
        """End leases: pinned pages are unpinned, and puts that were not committed are dropped. Unknown names are
        ignored. Returns how many leases ended."""
        with self._lock:
            ended = [lease for lease_id in lease_ids if (lease := self._leases.end(lease_id))]
            self._end_leases(ended)
            return len(ended)

    def sweep(self) -> None:
        """End the leases that have expired, as lookups and new puts do too."""
        with self._lock:
            self._expire()

    def open_watch(self, at: int = -1) -> Watcher:
        """Return a new watcher of a peer that knows all changes up to number `at`. With -1 the peer knows none: call
        `snapshot` before `wait_for_changes`. In the end call `close_watch`. Raises Overloaded if there are too many
        watchers."""
        with self._lock:
            return self._feed.add_watcher(at)

    def snapshot(self, watcher: Watcher) -> tuple[int, dict[str, list[PageKey]]]:
        """Return the number of the last change, and the keys of all pages of this instance by tier name. The watcher's
        next changes are those after that number."""
        with self._lock:
            return watcher.start_snapshot(), self._tier_manager.held_keys()

    def close_watch(self, watcher: Watcher) -> None:
        """Remove the watcher of a peer that has gone."""
        with self._lock:
            self._feed.remove_watcher(watcher)

    def stats(self) -> StoreStats:
        """Return counts and fill levels, after ending the leases that have expired."""
        with self._lock:
            self._expire()
            puts = sum(isinstance(lease.held, Put) for lease in self._leases)
            counts = dataclasses.replace(self._counts, corrupt=self._counts.corrupt + self._tier_manager.damaged_pages)
            return StoreStats(
                counts,
                len(self._ram),
                self._ram.used_bytes,
                self._ram.capacity_bytes,
                self._ram.evictions,
                len(self._leases) - puts,
                puts,
                self._puts.pending_bytes,
                len(self._feed),
                (self._ram_stats(counts), *(self._lookup_counts.tier_stats(tier.backend) for tier in self._tiers)),
            )

    def drain(self) -> None:
        """From now on, find no pages for lookups and want none for puts; close the watchers. Leases and puts under way
        go on."""
        with self._lock:
            self._draining = True
            self._feed.close()

    def flush(self, timeout_s: float) -> None:
        """Wait until all pages queued for the lower tiers are written, so that they are found after a restart, or
        dropped, but for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        for tier in self._tiers:
            tier.flush(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Stop the tiers' threads, close the watchers and give the memory back. Waits up to 5 s for each tier, and for
        threads that still write a page. If one of them or a backend hangs, or a page is still being read, the memory is
        not given back."""
        ended = [tier.close(_CLOSE_LIMIT_S) for tier in self._tiers]
        with self._lock:
            self._feed.close()
            if self._puts.wait_for_writers(_CLOSE_LIMIT_S) and all(ended) and not self._ram.is_read:
                self._ram.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each tier agrees with itself, pins agree with leases, and used memory with pages,
        puts and loads. Of the limits, those of leases and of pending put bytes are checked. First waits, up to 30 s per
        tier, for pages queued for lower tiers to be written; pages left after that raise nothing. Not to be called
        while a lookup is under way."""
        for tier in self._tiers:
            tier.check_integrity()
        with self._lock:
            pins: dict[RamPage, int] = {}
            puts: list[Put] = []
            for lease in self._leases:
                if isinstance(lease.held, Put):
                    puts.append(lease.held)
                else:
                    for page in lease.held.pages:
                        pins[page] = pins.get(page, 0) + 1
            self._ram.check_integrity(pins, self._puts.check_integrity(puts) | self._tier_manager.load_buffers())
            self._tier_manager.check_integrity()
            require(len(self._leases) <= self._config.max_leases, "more leases than the bound")

    def _keys(self, run: PageRun) -> tuple[PageKey, ...]:
        """Return the keys of the run's pages. Raises TooLarge for more than `max_keys` pages."""
        if len(run) > self._config.max_keys:
            raise TooLarge(
                "TOO_MANY_KEYS",
                f"{len(run)} pages in one call; the kvstore takes {self._config.max_keys}.",
                "Name fewer pages per call, or raise max_keys.",
                param="keys",
            )
        return run.keys()

    def _ram_stats(self, counts: StoreCounts) -> TierStats:
        """Return the fill of the RAM tier and its counts, the lookups' hits and misses included."""
        figures = self._lookup_counts.with_lookups(
            RAM,
            TierFigures(
                stored=counts.stored,
                corrupt=counts.corrupt,
                dropped=counts.refused,
                evictions=self._ram.evictions,
            ),
        )
        return TierStats(RAM, len(self._ram), self._ram.used_bytes, self._ram.capacity_bytes, True, figures)

    def _expire(self) -> None:
        """End the leases that have expired, and give up what they hold. Called with the lock held."""
        self._end_leases(self._leases.expire())

    def _end_leases(self, ended: Sequence[Lease[PinnedPages | Put]]) -> None:
        """Give up what ended leases hold: drop the pages of a put, unpin those of a lookup. Called with the lock
        held."""
        for lease in ended:
            if isinstance(lease.held, Put):
                self._puts.finish(lease.held, publish=False)
            else:
                self._ram.unpin(lease.held.pages)

    def _find_pinned(self, lease_id: bytes) -> PinnedPages:
        """Return the pages of a lookup's lease. Raises NotFound if it is unknown, has expired or is a put's."""
        held = self._leases.find(lease_id).held
        if isinstance(held, Put):
            raise NotFound("LEASE_UNKNOWN", "The lease is a put's.", "Look the pages up.", param="lease")
        return held

    def _find_put(self, lease_id: bytes) -> Put:
        """Return the put of a lease. Raises NotFound if it is unknown, has expired or is a lookup's."""
        held = self._leases.find(lease_id).held
        if isinstance(held, PinnedPages):
            raise NotFound("LEASE_UNKNOWN", "The lease is a lookup's.", "Begin a put.", param="lease")
        return held
