"""A kvstore in virtual time that is mostly real: PageStore with memory for few pages, a medium below it, and the
worker's own carrier on the other side. Pages travel framed; below and on the wire they are late, spoiled or cut short,
and now and then the whole kvstore is killed. None of that may be heard.

Its pages outlive replicas: what one has computed the next one finds.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.errors import QuireError, Unavailable
from quire_common.kv_client import Abandoned, PutOutcome
from quire_common.pages import HEADER_BYTES, PageKey, PageRun, frame_page
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.page_store import PageStore
from quire_scheduler.kv_traffic import LookupResult
from quire_worker.mover.carrier import KvStoreCarrier
from tests.exactness.virtual_kvstore import VirtualStore
from tests.exactness.virtual_mover import VirtualMover
from tests.exactness.virtual_time import VirtualTime

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import numpy as np

    from quire_common.credit import ModelInfo, PageMove
    from quire_scheduler.kv_traffic import Lookup
    from quire_scheduler.scheduler import Scheduler
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.scenario import Tiers
    from tests.exactness.virtual_kvstore import StoreWeather

# Pages are spoiled on purpose, which would fill the log.
for _name in ("quire_worker.mover.carrier", "quire_kvstore.page_store"):
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
    """See VirtualStore, and the module. Of the weather, `pages` and `corrupt` are the tiers' to say."""

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

    def carry_out(self, core: Scheduler) -> None:
        """See VirtualStore."""
        effects = core.take_effects()
        for lookup in effects.lookups:
            if self.down or self.chance(self.weather.fail_lookups):
                self.events["lookups failed"] += 1
                self._answer_late(core, lookup, self.weather.deadline_us, found=False)
            else:
                self._answer_late(core, lookup, self._rise(self._run(lookup)), found=True)
        for lease in effects.releases:
            # Raises where it was given back before, or never given.
            del self.leases[lease]
        self._store.release(effects.releases)

    def check_integrity(self) -> None:
        """See VirtualStore."""
        super().check_integrity()
        self._store.check_integrity()
        stats = self._store.stats()
        assert not stats.leases and not stats.pending_puts, f"the kvstore keeps leases: {stats}"

    # What a carrier needs of a KvClient.

    def put_pages(
        self,
        run: PageRun,
        dtype: str,
        page_bytes: int,
        body: Callable[[int], memoryview],
        *,
        on_wanted: Callable[[Sequence[int]], None],
        context: object,
    ) -> PutOutcome:
        """See KvClient."""
        self._reach()
        wanted, lease = self._store.begin_put(run, page_bytes, 0)
        if lease is None:
            return PutOutcome(0, 0, 0)
        try:
            on_wanted(wanted)
            for index in wanted:
                data = bytes(body(index))
                self._write(lease.id, index, self._spoiled(frame_page(run.key(index), dtype, data) + data, "put"))
        except Abandoned:
            self._store.release([lease.id])
            raise
        stored, refused = self._store.commit(lease.id)
        self.events["pages stored"] += stored
        self.events["pages refused"] += refused
        for index in wanted:
            self._sink(run.key(index))
        if self._tiers.strangers:
            self._strange(run)
        return PutOutcome(len(wanted), stored, refused)

    def get_pages(
        self, lease: bytes, indices: Sequence[int], *, context: object
    ) -> Generator[tuple[int, bytes], None, None]:
        """See KvClient."""
        for index in indices:
            self._reach()
            framed, last = b"", False
            while not last:
                part, last = self._store.read(lease, index, len(framed), _FRAME_BYTES)
                framed += part
            yield index, self._spoiled(framed, "get")

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
        framed, last = b"", False
        while not last:
            part, last = self._store.read(lease.id, 0, len(framed), _FRAME_BYTES)
            framed += part
        self._store.release([lease.id])
        self._below[key] = framed
        if len(self._below) > self._tiers.below_pages:
            self._below.popitem(last=False)

    def _put(self, key: PageKey, framed: bytes) -> bool:
        """One page; whether it was whole."""
        wanted, lease = self._store.begin_put(PageRun(key.namespace, key.group, (key.hash,)), self._kept.page_bytes, 0)
        if lease is None:
            return True  # there is no room: it stays below
        for index in wanted:
            self._write(lease.id, index, framed)
        return self._store.commit(lease.id)[1] == 0

    def _write(self, lease: bytes, index: int, framed: bytes) -> None:
        for at in range(0, len(framed), _FRAME_BYTES):
            self._store.write(lease, index, at, framed[at : at + _FRAME_BYTES])

    def _strange(self, run: PageRun) -> None:
        """Another model, and another group of this one, have pages of the same tokens, whole and of the same size."""
        for other in (replace(run, namespace=_STRANGE), replace(run, group=1)):
            for index in range(len(run)):
                body = self._rng.bytes(self._kept.page_bytes)
                self._put(other.key(index), frame_page(other.key(index), self._kept.dtype, body) + body)

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


class CarrierMover(VirtualMover):
    """A mover whose pages go by the worker's own carrier: what that takes for good is written, the rest is rubbish."""

    def __init__(
        self, time: VirtualTime, rng: np.random.Generator, pages: PageBytes, store: TieredStore, info: ModelInfo
    ) -> None:
        super().__init__(time, rng, pages, store)
        group = info.pages.groups[0]
        self._carrier = KvStoreCarrier(store, info.pages.namespace, group.dtype, pages.page_bytes)  # type: ignore[arg-type]  # the two calls that it makes are there

    def _load(self, move: PageMove, most: int) -> int:
        pages, good = move.device_page.tolist(), 0

        def write(index: int, body: memoryview) -> None:
            nonlocal good
            if index >= most:
                raise Abandoned
            self._pages.write_page(pages[index], body)
            good = index + 1

        try:
            self._carrier.load(move, write)
        except (Abandoned, QuireError):
            assert good < len(pages), "a load was whole and failed"
        for page in pages[good:]:
            self._rubbish(page)
        return good

    def _put(self, move: PageMove, most: int) -> int:
        def read(index: int) -> memoryview:
            if index >= most:
                raise Abandoned
            return memoryview(self._pages.read_page(int(move.device_page[index]))).cast("B")

        try:
            return self._carrier.store(move, lambda wanted: None, read)
        except (Abandoned, QuireError):
            return 0
