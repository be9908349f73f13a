"""The arm that bench.kvstore.mover compares with: page I/O on threads of the engine's own process, straight from its
pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.moves import MoveResult
from quire_worker.engine.ports import PageBytes
from quire_worker.mover.carrier import Carrier


class ThreadMover:
    """Just enough of a Mover: loads and stores on a thread each."""

    def __init__(self, carrier: Carrier, pool: PageBytes) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._carrier = carrier
        self._pool = pool
        self._ended: queue.SimpleQueue[MoveResult] = queue.SimpleQueue()
        self._jobs: dict[MoveKind, queue.SimpleQueue[PageMove | None]] = {
            kind: queue.SimpleQueue() for kind in (MoveKind.LOAD, MoveKind.STORE)
        }
        self._threads = [threading.Thread(target=self._work, args=(jobs,)) for jobs in self._jobs.values()]
        for thread in self._threads:
            thread.start()

    def submit(self, move: PageMove) -> bool:
        self._jobs[move.kind].put(move)
        return True

    def offer(self, move_id: int, pages: int) -> None:
        """It exports nothing."""

    def end_early(self, move_id: int) -> None:
        """Moves here end by themselves."""

    def finished(self) -> list[MoveResult]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def cancel(self) -> None:
        raise NotImplementedError("a benchmark ends its moves")

    def close(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, jobs: queue.SimpleQueue[PageMove | None]) -> None:
        while (move := jobs.get()) is not None:
            begin = time.perf_counter_ns()
            pages = self._carry(move)
            us = (time.perf_counter_ns() - begin) // 1000
            self._ended.put(MoveResult(move.id, pages == len(move.device_page), pages, us))
            self.wake()

    def _carry(self, move: PageMove) -> int:
        places = move.device_page.tolist()
        if move.kind == MoveKind.LOAD:
            return self._carrier.load(move, PoolLanding(self._pool, places))
        return self._carrier.store(move, PoolShipment(self._pool, places))


class PoolLanding:
    """Implements Landing: over a buffer into the pool."""

    def __init__(self, pool: PageBytes, places: list[int]) -> None:
        self._pool = pool
        self._places = places
        self._buffer = bytearray(len(memoryview(pool.read_page(places[0])).cast("B")))
        self.landed = 0

    def room(self) -> memoryview:
        return memoryview(self._buffer)

    def land(self) -> None:
        self._pool.write_page(self._places[self.landed], memoryview(self._buffer))
        self.landed += 1

    def tell(self) -> None:
        """Nobody waits for single pages."""


class PoolShipment:
    """Implements Shipment, but for memory to be lent. Pages are copied: what is stored must not change on its way."""

    fd = -1

    def __init__(self, pool: PageBytes, places: list[int]) -> None:
        self._pool = pool
        self._places = places
        self.left: list[int] = []

    def want(self, indices: Sequence[int]) -> None:
        self.left = list(indices)

    def ready(self, index: int) -> bool:
        return True

    def body(self, index: int) -> memoryview:
        return memoryview(bytes(self._pool.read_page(self._places[index])))

    def place(self, index: int) -> int:
        raise NotImplementedError("it is in nobody's file")

    def gone(self, index: int) -> None:
        self.left.remove(index)
