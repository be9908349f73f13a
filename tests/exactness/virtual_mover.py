"""A mover and a kvstore in virtual time: pages travel as bytes, late, sometimes in part; lookups are answered late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_scheduler.kv_traffic import LookupResult
from quire_worker.engine.moves import MoveResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from quire_common.credit import PageMove
    from quire_scheduler.kv_traffic import Lookup
    from quire_scheduler.scheduler import Scheduler
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.virtual_time import VirtualTime

_LEASE_US = 30_000_000


class VirtualMover:
    """See quire_worker.engine.moves.Mover. `store` is the kvstore's pages by hash."""

    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        pages: PageBytes,
        store: dict[bytes, bytes],
        store_us: int,
        fail_moves: float,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.failed = 0
        self._time = time
        self._rng = rng
        self._pages = pages
        self._store = store
        self._store_us = store_us
        self._fail_moves = fail_moves
        self._ended: list[MoveResult] = []
        self._run = 0

    def submit(self, move: PageMove) -> bool:
        """See Mover."""
        if self._rng.random() < self._fail_moves / 3:
            self.failed += 1
            return False
        run = self._run
        self._time.after(int(self._rng.integers(0, self._store_us + 1)), lambda: self._end(run, move))
        return True

    def finished(self) -> list[MoveResult]:
        """See Mover."""
        ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None:
        """See Mover."""
        self._run += 1

    def close(self) -> None:
        """See Mover."""
        self.cancel()

    def _end(self, run: int, move: PageMove) -> None:
        if run != self._run:
            return
        wanted = good = len(move.device_page)
        if self._rng.random() < self._fail_moves:
            good = int(self._rng.integers(0, wanted))
            self.failed += 1
        for index, page in enumerate(move.device_page.tolist()):
            if index >= good:
                if move.kind is MoveKind.LOAD:
                    # What did not arrive whole may have arrived in part.
                    self._pages.write_page(page, bytes(self._rng.bytes(self._pages.page_bytes)))
                break
            if move.kind is MoveKind.LOAD:
                self._pages.write_page(page, self._store[move.hashes[index]])
            else:
                self._store[move.hashes[index]] = bytes(self._pages.read_page(page))
        self._ended.append(MoveResult(move.id, good == wanted, good, 1))
        self.wake()


class VirtualStore:
    """The kvstore as schedulers see it. `leases` are those that nobody has given back; `changed` is called after an
    answer."""

    def __init__(self, time: VirtualTime, rng: np.random.Generator, store_us: int, changed: Callable[[], None]) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.leases: set[bytes] = set()
        self.hits = 0
        self._time = time
        self._rng = rng
        self._store_us = store_us
        self._changed = changed
        self._next_lease = 0

    def carry_out(self, core: Scheduler) -> None:
        """Look up what the core asks for, take back what it releases."""
        effects = core.take_effects()
        for lookup in effects.lookups:
            late_us = int(self._rng.integers(0, self._store_us + 1))
            self._time.after(late_us, lambda lookup=lookup: self._find(core, lookup))  # type: ignore[misc]  # the default binds the loop's variable
        for lease in effects.releases:
            # Raises where it was given back before.
            self.leases.remove(lease)

    def _find(self, core: Scheduler, lookup: Lookup) -> None:
        hashes = lookup.hashes
        found = next((index for index, digest in enumerate(hashes) if digest not in self.pages), len(hashes))
        leases: tuple[bytes, ...] = ()
        if found:
            self.hits += 1
            self._next_lease += 1
            leases = (self._next_lease.to_bytes(8, "big"),)
            self.leases.update(leases)
        # Some leases end while their request still waits for its slot.
        expires_us = _LEASE_US if self._rng.random() < 0.8 else 20_000
        core.on_lookup(lookup.uid, LookupResult(found, leases, 50, self._time.now_s + expires_us / 1e6))
        self.carry_out(core)
        self._changed()
