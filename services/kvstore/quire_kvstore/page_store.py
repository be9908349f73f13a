"""The store: pages, the leases that hold them, and puts in two phases. All methods may be called from any thread.

One lock guards everything, and nothing slow happens under it: a frame is copied (a memcpy holds the interpreter
anyway), but checksums are computed outside, by the one thread that a committing put belongs to.

    BeginPut   reserves memory; the pages are invisible, and no other put wants them meanwhile
    CommitPut  makes the complete and intact ones visible, gives the memory of the others back
    a lease's end, by release or by time, unpins what a lookup pinned and drops a put that was not committed
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, NotFound, TooLarge
from quire_common.pages import HEADER_BYTES, PageCorrupt, check_page
from quire_common.telemetry.logs import get_logger
from quire_kvstore.leases import Lease, LeaseTable
from quire_kvstore.page_feed import PageFeed
from quire_kvstore.puts import Put
from quire_kvstore.ram_tier import RamTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.pages import PageKey, PageRun
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.page_feed import Watcher

log = get_logger(__name__)
_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True)
class Pinned:
    """What a lookup's lease holds."""

    keys: tuple[PageKey, ...]


@dataclass
class StoreCounts:
    """What happened since the start, in pages; `refused` were put but did not become visible."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0


@dataclass(frozen=True)
class StoreStats:
    """A moment's picture."""

    counts: StoreCounts
    pages: int
    used_bytes: int
    capacity_bytes: int
    evictions: int
    leases: int
    pending_puts: int
    pending_bytes: int
    watchers: int


class PageStore:
    """See the module."""

    def __init__(self, config: KvstoreConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._committed = threading.Condition(self._lock)
        self._tier = RamTier(config.ram_bytes)
        self._leases: LeaseTable[Pinned | Put] = LeaseTable(
            config.max_leases, config.default_lease_ms, config.max_lease_ms, clock
        )
        self._feed = PageFeed(config.max_watchers, config.watch_queue)
        self._counts = StoreCounts()
        self._pending: set[PageKey] = set()
        self._pending_bytes = 0
        self._committing: list[Put] = []
        self._draining = False

    def lookup(self, run: PageRun, lease_ms: int, *, pin: bool) -> tuple[int, Lease[Pinned | Put] | None]:
        """Length of the longest prefix that is here, and the lease that keeps it; no lease if nothing was found."""
        keys = self._keys(run)
        with self._lock:
            self._expire()
            found = 0 if self._draining else self._tier.prefix(keys)
            lease = None
            if pin and found:
                held = keys[:found]
                lease = self._leases.grant(Pinned(held), lease_ms)
                self._tier.pin(held)
            if pin:
                self._counts.hits += found
                self._counts.misses += len(keys) - found
            return found, lease

    def read(self, lease_id: bytes, index: int, offset: int, size: int) -> tuple[bytes, bool]:
        """A part of a pinned page, and whether it is its last; raises NotFound as soon as the lease has expired."""
        with self._lock:
            key = self._pinned(lease_id).keys[index]
            return self._tier.read(key, offset, size), offset + size >= self._tier.size(key)

    def readable(self, lease_id: bytes, indices: Sequence[int]) -> Sequence[int]:
        """The indices that a read may ask for, all if none is given; raises NotFound, InvalidArgument."""
        with self._lock:
            count = len(self._pinned(lease_id).keys)
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
            missing = [i for i, key in enumerate(keys) if key not in self._tier and key not in self._pending]
            if missing and not self._draining:
                self._leases.require_room()
            offsets = self._reserve(missing, size, keep=[key for key in keys if key in self._tier])
            self._counts.refused += len(missing) - len(offsets)
            self._publish_evictions()
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

    def open_watch(self) -> Watcher:
        """A watcher; raises Overloaded. Call `snapshot` before `Watcher.next`, and `close_watch` in the end."""
        with self._lock:
            return self._feed.open()

    def snapshot(self, watcher: Watcher) -> tuple[int, list[PageKey]]:
        """Sequence number and all visible pages; the watcher goes on from there."""
        with self._lock:
            watcher.restart()
            return self._feed.sequence, list(self._tier)

    def close_watch(self, watcher: Watcher) -> None:
        """The peer has gone."""
        with self._lock:
            self._feed.drop(watcher)

    def stats(self) -> StoreStats:
        """Counts and fill."""
        with self._lock:
            self._expire()
            puts = sum(isinstance(lease.held, Put) for lease in self._leases)
            return StoreStats(
                StoreCounts(**vars(self._counts)),
                len(self._tier),
                self._tier.used_bytes,
                self._tier.capacity_bytes,
                self._tier.evictions,
                len(self._leases) - puts,
                puts,
                self._pending_bytes,
                len(self._feed),
            )

    def drain(self) -> None:
        """Find nothing and want nothing from now on; end the watchers."""
        with self._lock:
            self._draining = True
            self._feed.close()

    def close(self) -> None:
        """Drop everything. Commits that still compute checksums are waited for."""
        with self._lock:
            self._feed.close()
            if self._committed.wait_for(lambda: not self._committing, _CLOSE_LIMIT_S):
                self._tier.close()

    def check_integrity(self) -> None:
        """Everything agrees: pins with leases, memory with pages and puts, bounds with what they bound."""
        with self._lock:
            pins: dict[PageKey, int] = {}
            puts = list(self._committing)
            for lease in self._leases:
                if isinstance(lease.held, Put):
                    puts.append(lease.held)
                else:
                    for key in lease.held.keys:
                        pins[key] = pins.get(key, 0) + 1
            reserved = {offset: put.framed_bytes for put in puts for offset in put.offsets.values()}
            self._tier.check_integrity(pins, reserved)
            assert self._pending == {key for put in puts for key in put.wanted_keys()}
            assert not any(key in self._tier for key in self._pending), "a page under way is not visible"
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

    def _reserve(self, missing: Sequence[int], size: int, keep: Sequence[PageKey]) -> dict[int, int]:
        """Memory for as many of the missing pages as there may be, from the first on; not at the cost of `keep`."""
        offsets: dict[int, int] = {}
        self._tier.pin(keep)
        for index in missing if not self._draining else ():
            pending_bytes = self._pending_bytes + size * (len(offsets) + 1)
            offset = self._tier.reserve(size) if pending_bytes <= self._config.max_pending_bytes else None
            if offset is None:
                break
            offsets[index] = offset
        self._tier.unpin(keep)
        return offsets

    def _intact(self, put: Put, index: int) -> bool:
        with self._tier.reserved(put.offsets[index], put.framed_bytes) as framed:
            try:
                check_page(framed, put.run.key(index)).release()
            except PageCorrupt as error:
                log.warning("a page was put corrupt", index=index, reason=str(error))
                return False
        return True

    def _finish(self, put: Put, intact: Sequence[int]) -> None:
        """Publish the intact pages, and forget the put."""
        self._pending.difference_update(put.wanted_keys())
        self._pending_bytes -= put.pending_bytes
        for index in sorted(put.offsets.keys() - set(intact)):
            self._tier.cancel(put.offsets[index])
        for index in intact:
            self._tier.publish(put.run.key(index), put.offsets[index], put.framed_bytes)
        if intact:
            self._tier.touch(put.run.keys())  # all of it, since the head may have been here before
        self._counts.stored += len(intact)
        self._counts.refused += len(put.offsets) - len(intact)
        parents = [put.run.hashes[index - 1] if index else b"" for index in intact]
        self._feed.publish([put.run.key(index) for index in intact], parents)

    def _publish_evictions(self) -> None:
        self._feed.publish(removed=self._tier.take_evicted())

    def _expire(self) -> None:
        self._let_go(self._leases.expire())

    def _let_go(self, ended: Sequence[Lease[Pinned | Put]]) -> None:
        for lease in ended:
            if isinstance(lease.held, Put):
                self._finish(lease.held, ())
            else:
                self._tier.unpin(lease.held.keys)

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
