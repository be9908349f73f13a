"""PutManager: puts in two phases, and the memory of their incomplete pages. It knows nothing of lookups.

    begin    reserves memory; the pages are invisible, and other puts skip them meanwhile
    write    fills the memory; the thread that writes the end of a page checks it at once, while it is in the cache
    finish   makes the intact pages visible, and frees the memory of the others

Only this process can write to the memory of a page (see Arena), so a checked page stays unchanged. If a thread is still
writing to a page when its put ends, the memory is freed when the thread has finished. Methods whose names begin with
`_`, and those that say so, are called with the store's lock held. Checksums are computed without the lock.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, TooLarge, require
from quire_common.pages import HEADER_BYTES, PageCorrupt, check_parts, remove_mac, split_page
from quire_common.telemetry.logs import get_logger
from quire_kvstore.puts import Put
from quire_kvstore.ram_tier import RAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageKey, PageRun
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.ram_tier import RamPage, RamTier
    from quire_kvstore.store_stats import StoreCounts
    from quire_kvstore.tier_manager import TierManager

    FindPut = Callable[[bytes], Put]

log = get_logger(__name__)
_WRITER_TIMEOUT_S = 2.0
"""A sender whose connection broke starts the page anew on another; the store waits so long for the first writer to
notice and leave."""


@dataclass(slots=True)
class PageBuffer:
    """Memory for a part of a page."""

    view: memoryview
    checksum: int | None = None
    """The page's checksum, from `pages.copy_body`, which copied it out of a client's shared memory. None: the page came
    over a network."""

    def set_checksum(self, checksum: int) -> None:
        """Note that the whole page is in the memory and that its body, as it was copied, has this checksum under the
        page's header."""
        self.checksum = checksum


class PutManager:
    """Begins, fills and ends puts. `find_put` returns the put of a lease, or raises NotFound; it must be called with
    the lock held. `mac`, if given, verifies pages that do not come from this host's memory."""

    def __init__(
        self,
        config: KvstoreConfig,
        lock: threading.Lock,
        ram: RamTier,
        tier_manager: TierManager,
        counts: StoreCounts,
        find_put: FindPut,
        mac: PageMac | None = None,
    ) -> None:
        self._config = config
        self._lock = lock
        self._ram = ram
        self._tier_manager = tier_manager
        self._counts = counts
        self._find_put = find_put
        self._mac = mac
        self._pending: set[PageKey] = set()
        self._orphans: dict[int, int] = {}
        """Memory, by offset, of ended puts that is still being written."""
        self._writers = 0
        self._writer_left = threading.Condition(lock)
        self.pending_bytes = 0

    def missing(self, keys: Sequence[PageKey], page_bytes: int) -> list[int]:
        """Return the indices of the pages that neither RAM nor a local tier has and no other put brings. `page_bytes`
        is the size of one page's body. Raises InvalidArgument for a page named twice, TooLarge for a bad page size.
        Called with the lock held."""
        if len(set(keys)) < len(keys):
            raise InvalidArgument("DUPLICATE_PAGE", "A page is named twice in one put.", "Name each page once.")
        if not 0 < page_bytes <= self._config.max_page_bytes:
            raise TooLarge(
                "BAD_PAGE_SIZE",
                f"A page of {page_bytes} bytes; the kvstore takes 1 to {self._config.max_page_bytes}.",
                "Put smaller pages, or raise max_page_bytes.",
                param="page_bytes",
            )
        return [i for i, key in enumerate(keys) if key not in self._pending and not self._tier_manager.has_page(key)]

    def begin(self, run: PageRun, page_bytes: int, missing: Sequence[int]) -> Put | None:
        """Reserve memory for the missing pages, or from the first on for as many as memory and `max_pending_bytes`
        allow, evicting other pages but none of this run; pages of the run in RAM move to the end of the order of
        eviction. A page larger than `max_pending_bytes` is taken if no other page is pending. Returns the pages as a
        put, pending until `finish`; None if there is no room at all. Pages without room count as refused, and watchers
        are told of evictions. Called with the lock held."""
        keep = [page for index in range(len(run)) if (page := self._ram.get(run.key(index)))]
        offsets = self._reserve(missing, HEADER_BYTES + page_bytes, keep)
        self._counts.add_put(0, len(missing) - len(offsets))
        self._tier_manager.publish_evictions()
        if not offsets:
            return None
        put = Put(run, page_bytes, offsets)
        self._pending.update(put.wanted_keys())
        self.pending_bytes += put.pending_bytes
        return put

    @contextlib.contextmanager
    def page_buffer(
        self, lease_id: bytes, index: int, offset: int = 0, size: int | None = None
    ) -> Iterator[PageBuffer]:
        """Context manager: yield memory for a part of a page, by default for all of it, which the caller fills. Offset
        and size count the page's header, too. After the page's last byte the page is verified; a corrupt one is
        counted, and raises nothing. If the caller raises, the whole page counts as missing. A first part waits, at most
        2 s, for another stream that still writes the page. Raises NotFound if the lease is unknown, has expired or is a
        lookup's. Raises InvalidArgument for a part that is too long, or neither the first nor the next one of its page,
        and for a page that is not wanted or has a writer."""
        with self._lock:
            put = self._find_put(lease_id)
            if put.restarts_under_writer(index, offset):
                self._writer_left.wait_for(lambda: index not in put.busy, _WRITER_TIMEOUT_S)
                put = self._find_put(lease_id)  # it may have ended meanwhile
            size = put.framed_bytes if size is None else size
            start = put.begin(index, offset, size)
            self._writers += 1
        received, intact = 0, None
        try:
            with self._ram.reserved(start, size) as view:
                yield (buffer := PageBuffer(view))
            received = offset + size
            if received == put.framed_bytes:
                with self._ram.reserved(put.offsets[index], put.framed_bytes) as framed:
                    intact = self._verify(framed, put.run.key(index), buffer.checksum)
        finally:
            with self._lock:
                put.end(index, received)
                if intact:
                    put.intact.add(index)
                self._counts.add_put(0, 0, int(intact is False))
                if self._orphans.pop(put.offsets[index], None) is not None:
                    self._ram.cancel(put.offsets[index])
                self._writers -= 1
                self._writer_left.notify_all()

    def wait_for_writers(self, timeout_s: float) -> bool:
        """Wait until no thread writes a page any more; returns False if that takes longer than `timeout_s`. Called with
        the lock held, which is released meanwhile."""
        return self._writer_left.wait_for(lambda: not self._writers, timeout_s)

    def finish(self, put: Put, *, publish: bool) -> int:
        """End the put; its lease is left to the caller. With `publish`, the put's intact pages become visible, and
        watchers and write-through tiers learn of them; if there is any, the pages of the run that are in RAM move to
        the end of the order of eviction. Of a page that a lookup has brought meanwhile, the put's copy is freed, and it
        counts as visible. The memory of all other pages is freed, at once or when the page's writer has finished, and
        these pages are added to the store's count of refused pages. Without `publish`, this happens to all pages of the
        put. Returns how many pages became visible. Called with the lock held."""
        intact = sorted(put.intact) if publish else []
        self._pending.difference_update(put.wanted_keys())
        self.pending_bytes -= put.pending_bytes
        for index in sorted(put.offsets.keys() - set(intact)):
            if index in put.busy:
                self._orphans[put.offsets[index]] = put.framed_bytes
            else:
                self._ram.cancel(put.offsets[index])
        for index in intact:
            if put.run.key(index) in self._ram:  # a lookup has brought it from below meanwhile
                self._ram.cancel(put.offsets[index])
            else:
                self._ram.publish(put.run.key(index), put.offsets[index], put.framed_bytes)
        if intact:
            self._ram.refresh(put.run.keys())  # all of it, since the head may have been here before
        self._counts.add_put(len(intact), len(put.offsets) - len(intact))
        parents = [put.run.hashes[index - 1] if index else b"" for index in intact]
        self._tier_manager.stored([put.run.key(index) for index in intact], parents)
        return len(intact)

    def check_integrity(self, puts: Sequence[Put]) -> dict[int, int]:
        """Raise AssertionError unless pending pages and bytes are those of these puts and within the bound, and in each
        put only pages that have memory are intact or being written, and none is both. Returns the memory of these puts
        and of ended puts that are still being written, as sizes by offset. Called with the lock held."""
        require(
            self._pending == {key for put in puts for key in put.wanted_keys()},
            "pending pages are not those of the puts",
        )
        counted = sum(put.pending_bytes for put in puts)
        largest_framed_bytes = HEADER_BYTES + self._config.max_page_bytes
        bound = max(self._config.max_pending_bytes, largest_framed_bytes)
        require(self.pending_bytes == counted <= bound, "pending bytes were miscounted")
        for put in puts:
            require(put.busy <= put.offsets.keys(), "a page that has no memory is being written")
            require(put.intact <= put.offsets.keys() - put.busy, "a page that is being written counts as complete")
        return self._orphans | {offset: put.framed_bytes for put in puts for offset in put.offsets.values()}

    def _verify(self, framed: memoryview, key: PageKey, checksum: int | None) -> bool:
        """Return whether a page that has arrived matches its key. Without `checksum`, its own checksum is verified and,
        if there is a MAC key, its MAC. With `checksum` (of a copy from shared memory), that is compared; the page needs
        no MAC and, if there is a MAC key, loses its unverified MAC."""
        if checksum is None:
            return is_intact(framed, key, mac=self._mac)
        if self._mac is not None:
            remove_mac(framed[:HEADER_BYTES])
        return is_intact(framed, key, checksum)

    def _reserve(self, missing: Sequence[int], size: int, keep: Sequence[RamPage]) -> dict[int, int]:
        """Reserve `size` bytes for each of the missing pages, from the first on, until memory or `max_pending_bytes` is
        used up. A page larger than `max_pending_bytes` may be pending alone. Pages of `keep` are not evicted, and are
        refreshed. Returns the offsets by index."""
        offsets: dict[int, int] = {}
        limit_bytes = max(self._config.max_pending_bytes, size)
        for page in keep:
            self._ram.acquire_page(page)
        for index in missing:
            pending_bytes = self.pending_bytes + size * (len(offsets) + 1)
            offset = self._ram.reserve(size) if pending_bytes <= limit_bytes else None
            if offset is None:
                break
            offsets[index] = offset
        for page in keep:
            self._ram.release_page(page)
        self._ram.refresh([page.key for page in keep])
        return offsets


def is_intact(framed: memoryview, key: PageKey, checksum: int | None = None, mac: PageMac | None = None) -> bool:
    """Return whether a framed page in memory matches its key and checksum and, with `mac`, its MAC; if not, that is
    logged. `checksum`: see PageBuffer."""
    try:
        check_parts(*split_page(framed), key, checksum=checksum, mac=mac)
    except PageCorrupt as error:
        log.warning("a page is corrupt", medium=RAM, reason=str(error))
        return False
    return True
