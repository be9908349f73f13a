"""A KV transfer agent in virtual time: pages travel as bytes, late, sometimes in part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_worker.engine.transfer_agent import MoveResult

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from quire_common.credit import PageMove
    from quire_worker.engine.ports import PageBytes
    from tests.exactness.virtual.virtual_kvstore import VirtualStore
    from tests.exactness.virtual.virtual_time import VirtualTime


class VirtualTransferAgent:
    def __init__(self, time: VirtualTime, rng: np.random.Generator, pages: PageBytes, store: VirtualStore) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.failed = 0
        self._time = time
        self._rng = rng
        self._pages = pages
        self._store = store
        self._ended: list[MoveResult] = []
        self._run = 0
        self._open: dict[int, PageMove] = {}

    def submit(self, move: PageMove) -> bool:
        if self._store.chance(self._store.weather.fail_moves / 3):
            self.failed += 1
            return False
        if move.kind is MoveKind.LOAD and self._rng.random() < 0.5:
            # From now on nobody may count on what these hold.
            for page in move.device_page.tolist():
                self._rubbish(page)
        run = self._run
        self._open[move.id] = move
        self._time.after(self._store.move_us(), lambda: self._end(run, move))
        return True

    def offer_pages(self, move_id: int, pages: int) -> None:
        """Does nothing: no peer pulls from this agent."""

    def end_move(self, move_id: int) -> None:
        if self._open.pop(move_id, None) is not None:
            self._ended.append(MoveResult(move_id, ok=False, pages=0, us=1))

    def take_results(self) -> list[MoveResult]:
        ended, self._ended = self._ended, []
        return ended

    def cancel_all(self) -> None:
        self._run += 1
        self._open.clear()

    def close(self) -> None:
        self.cancel_all()

    def _end(self, run: int, move: PageMove) -> None:
        if run != self._run or self._open.pop(move.id, None) is None:
            return
        wanted = most = len(move.device_page)
        if self._store.chance(self._store.weather.fail_moves):
            most = int(self._rng.integers(0, wanted))
        good = self._load(move, most) if move.kind is MoveKind.LOAD else self._put(move, most)
        self.failed += good < wanted
        self._ended.append(MoveResult(move.id, good == wanted, good, 1 + self._store.weather.delay_us // 2))
        self.wake()

    def _load(self, move: PageMove, most: int) -> int:
        """How many pages came whole."""
        for index, page in enumerate(move.device_page.tolist()):
            body = self._store.get(move.lease, move.hashes[index]) if index < most else None
            if body is None:
                # What did not arrive whole may have arrived in part.
                self._rubbish(page)
                return index
            self._pages.write_page(page, body)
        return len(move.device_page)

    def _put(self, move: PageMove, most: int) -> int:
        """How many pages were taken."""
        for index, page in enumerate(move.device_page.tolist()):
            if index >= most or not self._store.put(move.hashes[index], bytes(self._pages.read_page(page))):
                return index
        return len(move.device_page)

    def _rubbish(self, page: int) -> None:
        self._pages.write_page(page, bytes(self._rng.bytes(self._pages.page_bytes)))
