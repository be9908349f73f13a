"""The store: pages, the leases that hold them, and puts in two phases. All methods may be called from any thread.

One lock guards everything, and nothing slow happens under it: a frame is copied (a memcpy holds the interpreter
anyway), but checksums are computed outside, by the one thread that a committing put belongs to.

    BeginPut   reserves memory; the pages are invisible, and no other put wants them meanwhile
    CommitPut  makes the complete and intact ones visible, gives the memory of the others back
    a lookup   pins what is in memory, and waits a while for what the tiers below may have (ladder.py)
    a lease's end, by release or by time, unpins what a lookup pinned and drops a put that was not committed
"""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, NotFound, TooLarge
from quire_common.pages import HEADER_BYTES, PageCorrupt, check_page
from quire_common.telemetry.logs import get_logger
from quire_kvstore.ladder import Ladder
from quire_kvstore.leases import Lease, LeaseTable
from quire_kvstore.page_feed import PageFeed
from quire_kvstore.puts import Put
from quire_kvstore.ram_tier import MEDIUM, RamPage, RamTier
from quire_kvstore.store_stats import FoundCounts, StoreCounts, StoreStats, TierPicture
from quire_kvstore.tiers.medium import TierFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.pages import PageKey, PageRun
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.page_feed import Watcher
    from quire_kvstore.tiers.tier import Tier

log = get_logger(__name__)
_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True)
class Pinned:
    """What a lookup's lease holds. `medium` is the slowest that a page had to come from."""

    pages: tuple[RamPage, ...]
    medium: str


class PageStore:
    """See the module. `tiers` are those below memory, the fastest first; they run from `start` to `close`."""

    def __init__(
        self,
        config: KvstoreConfig,
        clock: Callable[[], float] = time.monotonic,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._committed = threading.Condition(self._lock)
        self._tier = RamTier(config.ram_bytes, config.ram_policy)
        self._leases: LeaseTable[Pinned | Put] = LeaseTable(
            config.max_leases, config.default_lease_ms, config.max_lease_ms, clock
        )
        self._feed = PageFeed(config.max_watchers, config.watch_queue)
        self._tiers = tiers
        self._ladder = Ladder(self._lock, self._tier, self._feed, tiers, config.max_prefetches)
        self._counts = StoreCounts()
        self._found = FoundCounts((MEDIUM, *(tier.medium.name for tier in tiers)))
        self._pending: set[PageKey] = set()
        self._pending_bytes = 0
        self._committing: list[Put] = []
        self._draining = False

    def start(self) -> None:
        """Open the tiers below memory; one that cannot be opened is done without."""
        for tier in self._tiers:
            tier.start(self._ladder)

    def lookup(
        self, run: PageRun, lease_ms: int, *, pin: bool, wait_s: float | None = None
    ) -> tuple[int, Lease[Pinned | Put] | None]:
        """Length of the longest prefix that is here, and the lease that keeps it; no lease if nothing was found.

        Pages of the tiers below are waited for, `wait_s` or the configured time; what has come by then counts.
        """
        keys = self._keys(run)
        if wait_s is None:
            wait_s = self._config.prefetch_ms / 1000
        with self._lock:
            self._expire()
            if self._draining:
                return 0, None
            if not pin:
                return next((i for i, key in enumerate(keys) if not self._ladder.has(key)), len(keys)), None
            prefetch = self._ladder.gather(keys, wait_s)
            held = self._ladder.end(prefetch)
            lease = None
            try:
                if held and not self._draining:
                    lease = self._leases.grant(Pinned(tuple(held), self._found.slowest(prefetch, len(held))), lease_ms)
            finally:
                if lease is None:
                    self._tier.unpin(held)
            found = len(held) if lease else 0
            self._found.count(prefetch, found)
            self._counts.hits += found
            self._counts.misses += len(keys) - found
            return found, lease

    def read(self, lease_id: bytes, index: int, offset: int, size: int) -> tuple[bytes, bool]:
        """A part of a pinned page, and whether it is its last; raises NotFound as soon as the lease has expired, and
        where the page has gone bad in memory, which is looked at when its first part is read."""
        with self._lock:
            page = self._pinned(lease_id).pages[index]
            if offset:
                return self._tier.read(page, offset, size), offset + size >= page.size
            self._tier.lend(page)
        try:
            with self._tier.view(page) as framed:
                intact = not page.dropped and self._is_intact(framed, page.key)
        finally:
            with self._lock:
                self._tier.give_back(page)
        with self._lock:
            if not intact:
                self._ladder.drop(page)
                raise NotFound("PAGE_LOST", "A page of the lease went bad in memory.", "Treat it as a miss.")
            self._pinned(lease_id)
            return self._tier.read(page, offset, size), size >= page.size

    def readable(self, lease_id: bytes, indices: Sequence[int]) -> Sequence[int]:
        """The indices that a read may ask for, all if none is given; raises NotFound, InvalidArgument."""
        with self._lock:
            count = len(self._pinned(lease_id).pages)
        for index in indices:
            if not 0 <= index < count:
                raise InvalidArgument(
                    "BAD_PAGE_INDEX", f"Page {index} was asked for, the lease has {count}.", "Ask for pages found."
                )
        return indices or range(count)

    def begin_put(self, run: PageRun, page_bytes: int, lease_ms: int) -> tuple[list[int], Lease[Pinned | Put] | None]:
        """Indices of the pages that are wanted, and the lease to put them under; none wanted, no lease.

        A page is not wanted if it is here, if another put brings it, or if there is no room that could be made.
        """
        keys = self._keys(run)
        if len(set(keys)) < len(keys):
            raise InvalidArgument("DUPLICATE_PAGE", "A page is named twice in one put.", "Name each page once.")
        if not 0 < page_bytes <= self._config.max_page_bytes:
            raise TooLarge(
                "BAD_PAGE_SIZE",
                f"A page of {page_bytes} bytes; the kvstore takes 1 to {self._config.max_page_bytes}.",
                "Put smaller pages, or raise max_page_bytes.",
                param="page_bytes",
            )
        size = HEADER_BYTES + page_bytes
        with self._lock:
            self._expire()
            missing = [i for i, key in enumerate(keys) if key not in self._pending and not self._ladder.has(key)]
            if missing and not self._draining:
                self._leases.require_room()
            offsets = self._reserve(missing, size, keep=[page for key in keys if (page := self._tier.get(key))])
            self._counts.refused += len(missing) - len(offsets)
            self._ladder.publish_evictions()
            if not offsets:
                return [], None
            put = Put(run, page_bytes, offsets)
            self._pending.update(put.wanted_keys())
            self._pending_bytes += put.pending_bytes
            return list(offsets), self._leases.grant(put, lease_ms)

    def write(self, lease_id: bytes, index: int, offset: int, data: bytes) -> None:
        """One frame of a put; raises NotFound, InvalidArgument."""
        with self._lock:
            put = self._put(lease_id)
            start = put.accept(index, offset, len(data))
            with self._tier.reserved(start, len(data)) as view:
                view[:] = data

    def complete_pages(self, lease_id: bytes) -> int:
        """How many of a put's pages have come whole; raises NotFound."""
        with self._lock:
            put = self._put(lease_id)
            return sum(put.complete(index) for index in put.offsets)

    def commit(self, lease_id: bytes) -> tuple[int, int]:
        """End a put; returns how many pages became visible and how many were refused. Raises NotFound."""
        with self._lock:
            put = self._put(lease_id)
            self._leases.end(lease_id)  # from here on the put is this thread's alone
            self._committing.append(put)
        intact: list[int] = []
        corrupt = 0
        try:
            for index in put.offsets:
                if put.complete(index):
                    ok = self._intact(put, index)
                    corrupt += not ok
                    if ok:
                        intact.append(index)
        finally:
            with self._lock:
                self._committing.remove(put)
                self._committed.notify_all()
                self._finish(put, intact)
                self._counts.corrupt += corrupt
        return len(intact), len(put.offsets) - len(intact)

    def renew(self, lease_id: bytes, lease_ms: int) -> int:
        """Prolong a lease; returns its life in ms. Raises NotFound."""
        with self._lock:
            return self._leases.renew(lease_id, lease_ms)

    def release(self, lease_ids: Sequence[bytes]) -> int:
        """End leases; unknown ones are none. Returns how many ended."""
        with self._lock:
            ended = [lease for lease_id in lease_ids if (lease := self._leases.end(lease_id))]
            self._let_go(ended)
            return len(ended)

    def sweep(self) -> None:
        """End what has expired; calls that come in do so as well."""
        with self._lock:
            self._expire()

    def open_watch(self, at: int = -1) -> Watcher:
        """A watcher; raises Overloaded. Without `at`, call `snapshot` before `next`; in the end `close_watch`."""
        with self._lock:
            return self._feed.open(at)

    def snapshot(self, watcher: Watcher) -> tuple[int, dict[str, list[PageKey]]]:
        """Sequence number and all pages of this instance by medium; the watcher goes on from there."""
        with self._lock:
            return watcher.restart(), self._ladder.held()

    def close_watch(self, watcher: Watcher) -> None:
        """The peer has gone."""
        with self._lock:
            self._feed.drop(watcher)

    def stats(self) -> StoreStats:
        """Counts and fill."""
        with self._lock:
            self._expire()
            puts = sum(isinstance(lease.held, Put) for lease in self._leases)
            counts = dataclasses.replace(self._counts, corrupt=self._counts.corrupt + self._ladder.damaged_pages)
            return StoreStats(
                counts,
                len(self._tier),
                self._tier.used_bytes,
                self._tier.capacity_bytes,
                self._tier.evictions,
                len(self._leases) - puts,
                puts,
                self._pending_bytes,
                len(self._feed),
                (self._picture(counts), *(self._found.picture(tier.medium) for tier in self._tiers)),
            )

    def drain(self) -> None:
        """Find nothing and want nothing from now on; end the watchers."""
        with self._lock:
            self._draining = True
            self._feed.close()

    def flush(self, timeout_s: float) -> None:
        """Wait until what waits to be written below is written, so that a restart finds it."""
        deadline = time.monotonic() + timeout_s
        for tier in self._tiers:
            tier.flush(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Drop everything. Commits that still compute checksums are waited for; a medium that hangs keeps its thread,
        and then the memory stays too."""
        ended = [tier.close(_CLOSE_LIMIT_S) for tier in self._tiers]
        with self._lock:
            self._feed.close()
            if self._committed.wait_for(lambda: not self._committing, _CLOSE_LIMIT_S) and all(ended):
                self._tier.close()

    def check_integrity(self) -> None:
        """Everything agrees: pins with leases, memory with pages and puts, bounds with what they bound."""
        for tier in self._tiers:
            tier.check_integrity()
        with self._lock:
            pins: dict[RamPage, int] = {}
            puts = list(self._committing)
            for lease in self._leases:
                if isinstance(lease.held, Put):
                    puts.append(lease.held)
                else:
                    for page in lease.held.pages:
                        pins[page] = pins.get(page, 0) + 1
            reserved = {offset: put.framed_bytes for put in puts for offset in put.offsets.values()}
            self._tier.check_integrity(pins, reserved | self._ladder.reserved())
            self._ladder.check_integrity()
            assert self._pending == {key for put in puts for key in put.wanted_keys()}
            assert self._pending_bytes == sum(put.pending_bytes for put in puts) <= self._config.max_pending_bytes
            assert len(self._leases) <= self._config.max_leases

    def _keys(self, run: PageRun) -> tuple[PageKey, ...]:
        if len(run) > self._config.max_keys:
            raise TooLarge(
                "TOO_MANY_KEYS",
                f"{len(run)} pages in one call; the kvstore takes {self._config.max_keys}.",
                "Name fewer pages per call, or raise max_keys.",
                param="keys",
            )
        return run.keys()

    def _reserve(self, missing: Sequence[int], size: int, keep: Sequence[RamPage]) -> dict[int, int]:
        """Memory for as many of the missing pages as there may be, from the first on; not at the cost of `keep`."""
        offsets: dict[int, int] = {}
        for page in keep:
            self._tier.lend(page)
        for index in missing if not self._draining else ():
            pending_bytes = self._pending_bytes + size * (len(offsets) + 1)
            offset = self._tier.reserve(size) if pending_bytes <= self._config.max_pending_bytes else None
            if offset is None:
                break
            offsets[index] = offset
        for page in keep:
            self._tier.give_back(page)
        self._tier.refresh([page.key for page in keep])
        return offsets

    def _intact(self, put: Put, index: int) -> bool:
        with self._tier.reserved(put.offsets[index], put.framed_bytes) as framed:
            return self._is_intact(framed, put.run.key(index))

    def _is_intact(self, framed: memoryview, key: PageKey) -> bool:
        try:
            check_page(framed, key).release()
        except PageCorrupt as error:
            log.warning("a page is corrupt", medium=MEDIUM, reason=str(error))
            return False
        return True

    def _finish(self, put: Put, intact: Sequence[int]) -> None:
        """Publish the intact pages, and forget the put."""
        self._pending.difference_update(put.wanted_keys())
        self._pending_bytes -= put.pending_bytes
        for index in sorted(put.offsets.keys() - set(intact)):
            self._tier.cancel(put.offsets[index])
        for index in intact:
            if put.run.key(index) in self._tier:  # a lookup has brought it from below meanwhile
                self._tier.cancel(put.offsets[index])
            else:
                self._tier.publish(put.run.key(index), put.offsets[index], put.framed_bytes)
        if intact:
            self._tier.refresh(put.run.keys())  # all of it, since the head may have been here before
        self._counts.stored += len(intact)
        self._counts.refused += len(put.offsets) - len(intact)
        parents = [put.run.hashes[index - 1] if index else b"" for index in intact]
        self._ladder.stored([put.run.key(index) for index in intact], parents)

    def _picture(self, counts: StoreCounts) -> TierPicture:
        figures = self._found.of(
            MEDIUM,
            TierFigures(
                stored=counts.stored,
                corrupt=counts.corrupt,
                dropped=counts.refused,
                evictions=self._tier.evictions,
            ),
        )
        return TierPicture(MEDIUM, len(self._tier), self._tier.used_bytes, self._tier.capacity_bytes, True, figures)

    def _expire(self) -> None:
        self._let_go(self._leases.expire())

    def _let_go(self, ended: Sequence[Lease[Pinned | Put]]) -> None:
        for lease in ended:
            if isinstance(lease.held, Put):
                self._finish(lease.held, ())
            else:
                self._tier.unpin(lease.held.pages)

    def _pinned(self, lease_id: bytes) -> Pinned:
        held = self._leases.find(lease_id).held
        if isinstance(held, Put):
            raise NotFound("LEASE_UNKNOWN", "The lease is a put's.", "Look the pages up.", param="lease")
        return held

    def _put(self, lease_id: bytes) -> Put:
        held = self._leases.find(lease_id).held
        if isinstance(held, Pinned):
            raise NotFound("LEASE_UNKNOWN", "The lease is a lookup's.", "Begin a put.", param="lease")
        return held
