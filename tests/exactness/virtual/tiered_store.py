"""A kvstore in virtual time that is mostly real: PageStore with memory for few pages, and a medium below it. Pages
travel framed; below and on the wire they are late, spoiled or cut short, and now and then the whole kvstore is killed.
None of that may be heard.

Its pages outlive replicas: what one has computed the next one finds.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire_common.errors import Unavailable
from quire_common.kv.kv_client import LeaseAccess, PutOutcome, StartedPut
from quire_common.pages import HEADER_BYTES, PageKey, PageRun, frame_page
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.page_store import PageStore
from quire_scheduler.kv.kv_traffic import LookupResult
from tests.exactness.virtual.virtual_kvstore import VirtualStore
from tests.exactness.virtual.virtual_time import VirtualTime

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy as np

    from quire_common.credit import ModelInfo
    from quire_scheduler.kv.kv_traffic import Lookup
    from tests.exactness.scenario import Tiers
    from tests.exactness.virtual.virtual_kvstore import StoreWeather

# Pages are spoiled on purpose, which would fill the log.
for _name in ("quire_worker.kv_transfer.kv_connector", "quire_kvstore.page_store", "quire_kvstore.put_manager"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)
_FRAME_BYTES = 1 << 16
_LEASE_MS = 30_000
_SHORT_LEASE_MS = 20
# What the scheduler takes for the usable part of a lease's time.
_USABLE = 0.8
# Another model's namespace.
_STRANGE = bytes(range(32))


class KeptPages:
    """What of a kvstore outlives a replica: memory, and what is below it."""

    def __init__(self, tiers: Tiers, info: ModelInfo) -> None:
        group = info.pages.groups[0]
        self.tiers = tiers
        self.namespace, self.dtype, self.page_bytes = info.pages.namespace, group.dtype, group.page_bytes
        self.below: OrderedDict[PageKey, bytes] = OrderedDict()
        self.time = VirtualTime()
        """The present replica's."""
        self.restart()

    def restart(self) -> None:
        """Memory and leases are gone, what is below stays."""
        footprint = -(-(HEADER_BYTES + self.page_bytes) // 64) * 64
        config = KvstoreConfig(ram_bytes=self.tiers.ram_pages * footprint)
        self.store = PageStore(config, clock=lambda: self.time.now_s)


class TieredStore(VirtualStore):
    """Implements VirtualStore, and the module. Of the weather, `pages` and `corrupt` are the tiers' to say."""

    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        weather: StoreWeather,
        changed: Callable[[], None],
        kept: KeptPages,
    ) -> None:
        super().__init__(time, rng, weather, changed)
        kept.time = time
        self._kept = kept
        self._tiers, self._below = kept.tiers, kept.below
        self._sent: list[PageKey] = []

    def check_integrity(self) -> None:
        super().check_integrity()
        self._store.check_integrity()
        stats = self._store.stats()
        assert not stats.leases and not stats.pending_puts, f"the kvstore keeps leases: {stats}"

    # What a carrier needs of a KvClient.

    def begin_put(self, run: PageRun, page_bytes: int, *, context: object) -> StartedPut:
        self._reach()
        for digest in run.hashes if self._tiers.strangers else ():
            self._strange(digest)
        wanted, lease, admitted = self._store.begin_put(run, page_bytes, 0)
        return StartedPut(wanted, LeaseAccess(lease.id if lease is not None else b""), admitted)

    def send_pages(
        self,
        lease: bytes,
        run: PageRun,
        dtype: str,
        indices: Sequence[int],
        body: Callable[[int], memoryview],
        *,
        timeout_s: float,
        context: object,
        mac: None,
    ) -> None:
        self._sent = [run.key(index) for index in indices]
        for index in indices:
            data = bytes(body(index))
            self._write(lease, index, self._spoiled(frame_page(run.key(index), dtype, data) + data, "put"))

    @contextlib.contextmanager
    def committing(self, begun: StartedPut, context: object) -> Iterator[list[PutOutcome]]:
        outcome, self._sent = list[PutOutcome](), []
        try:
            yield outcome
        except BaseException:
            self._store.release([begun.access.lease])
            raise
        stored, refused = self._store.commit(begun.access.lease)
        self.events["pages stored"] += stored
        self.events["pages refused"] += refused
        for key in self._sent:
            self._sink(key)
        outcome.append(PutOutcome(len(begun.wanted), stored, refused))

    def get_pages(
        self, lease: bytes, indices: Sequence[int], *, timeout_s: float, context: object
    ) -> Generator[tuple[int, bytes], None, None]:
        for index in indices:
            self._reach()
            yield index, self._spoiled(self._read(lease, index), "get")

    def check(self, lease: bytes, index: int, context: object) -> bool:
        return self._store.verify_page(lease, index)

    def _lookup_us(self, lookup: Lookup) -> int:
        return self._rise(self._run(lookup))

    def _take_back(self, leases: Sequence[bytes]) -> None:
        for lease in leases:
            # Raises where it was given back before, or never given.
            del self.leases[lease]
        self._store.release(leases)

    def _run(self, lookup: Lookup) -> PageRun:
        return PageRun(self._kept.namespace, 0, lookup.hashes)

    def _reach(self) -> None:
        if self.down:
            raise Unavailable("KVSTORE_GONE", "Nobody answers.", "Recompute.")

    def _find(self, lookup: Lookup) -> LookupResult:
        lease_ms = _SHORT_LEASE_MS if self.chance(self.weather.short_leases) else _LEASE_MS
        found, lease = self._store.lookup(self._run(lookup), lease_ms, pin=True, wait_s=0.0)
        if lease is None:
            return LookupResult(0, (), 50, 0.0)
        self.events["kvstore hits"] += 1
        self.events["pages found"] += found
        self.leases[lease.id] = lookup.hashes[:found]
        return LookupResult(found, (lease.id,), 50, self._time.now_s + lease_ms / 1000 * _USABLE)

    def _rise(self, run: PageRun) -> int:
        """Bring up what is below and comes in time; how long the lookup takes."""
        first, _ = self._store.lookup(run, 0, pin=False)
        took_us, most_us = int(self._rng.integers(0, self.weather.delay_us + 1)), self._tiers.patience_us
        for index in range(first, len(run)):
            key = run.key(index)
            framed = self._below.get(key)
            if framed is None or took_us + self._tiers.below_us > most_us:
                break
            took_us += self._tiers.below_us
            if not self._put(key, self._spoiled(framed, "rise")):
                self.events["rot below found"] += 1
                del self._below[key]
                break
            self.events["pages from below"] += 1
            self._below.move_to_end(key)
        return took_us

    def _sink(self, key: PageKey) -> None:
        """Written through, if it is here: a page that came spoiled is not."""
        if not self._tiers.below_pages:
            return
        _, lease = self._store.lookup(PageRun(key.namespace, key.group, (key.hash,)), 0, pin=True, wait_s=0.0)
        if lease is None:
            return
        self._below[key] = self._read(lease.id, 0)
        self._store.release([lease.id])
        if len(self._below) > self._tiers.below_pages:
            self._below.popitem(last=False)

    def _put(self, key: PageKey, framed: bytes) -> bool:
        """One page; whether it was whole."""
        wanted, lease, _ = self._store.begin_put(
            PageRun(key.namespace, key.group, (key.hash,)), self._kept.page_bytes, 0
        )
        if lease is None:
            return True  # there is no room: it stays below
        for index in wanted:
            self._write(lease.id, index, framed)
        return self._store.commit(lease.id)[1] == 0

    def _read(self, lease: bytes, index: int) -> bytes:
        framed, last = b"", False
        while not last:
            part, last = self._store.read(lease, index, len(framed), _FRAME_BYTES)
            framed += part
        return framed

    def _write(self, lease: bytes, index: int, framed: bytes) -> None:
        for at in range(0, len(framed), _FRAME_BYTES):
            self._store.write(lease, index, at, framed[at : at + _FRAME_BYTES])

    def _strange(self, digest: bytes) -> None:
        """Another model, and another group of this one, have a page of the same tokens, whole and of the same size."""
        for other in (PageRun(_STRANGE, 0, (digest,)), PageRun(self._kept.namespace, 1, (digest,))):
            body = self._rng.bytes(self._kept.page_bytes)
            self._put(other.key(0), frame_page(other.key(0), self._kept.dtype, body) + body)

    def _spoiled(self, framed: bytes, where: str) -> bytes:
        """Now and then some bit is not what it was, or the end is missing."""
        if not self.chance(self._tiers.rot):
            return framed
        self.events[f"spoiled: {where}"] += 1
        if where != "put" and self._rng.random() < 0.2:
            return framed[: int(self._rng.integers(0, len(framed)))]
        at = int(self._rng.integers(0 if self._rng.random() < 0.3 else HEADER_BYTES, len(framed)))
        return framed[:at] + bytes([framed[at] ^ 1 << int(self._rng.integers(8))]) + framed[at + 1 :]

    def _crash(self) -> None:
        self.events["kvstores lost"] += 1
        self.events["lost with leases out"] += bool(self.leases)
        self._store.close()
        self._kept.restart()

    @property
    def _store(self) -> PageStore:
        return self._kept.store
