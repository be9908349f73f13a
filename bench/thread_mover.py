"""The arm that bench.mover compares with: page I/O on threads of the engine's own process, straight from its pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

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
            return self._carrier.load(move, lambda index, body: self._pool.write_page(places[index], body))
        # A copy, as what is stored must not change on its way.
        return self._carrier.store(
            move, lambda indices: None, lambda index: memoryview(bytes(self._pool.read_page(places[index])))
        )
