"""The arm with which bench.kvstore.mover compares: page I/O on threads of the engine's own process, directly from its
pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.ports import PageBytes
from quire_worker.engine.transfer_agent import MoveResult
from quire_worker.kv_transfer.kv_connector import KvConnector


class ThreadAgent:
    """The part of a KvTransferAgent that the benchmark needs, with a thread for loads and one for stores."""

    def __init__(self, connector: KvConnector, pool: PageBytes) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._connector = connector
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

    def offer_pages(self, move_id: int, pages: int) -> None:
        """Do nothing, because this agent exports no pages."""

    def end_move(self, move_id: int) -> None:
        """Do nothing, because moves end by themselves."""

    def take_results(self) -> list[MoveResult]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def cancel_all(self) -> None:
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
            return self._connector.load(move, PoolPageSink(self._pool, places))
        return self._connector.store(move, PoolPageSource(self._pool, places))


class PoolPageSink:
    """Implements PageSink: writes pages over a buffer into the pool."""

    def __init__(self, pool: PageBytes, places: list[int]) -> None:
        self._pool = pool
        self._places = places
        self._buffer = bytearray(len(memoryview(pool.read_page(places[0])).cast("B")))
        self.received_pages = 0

    def next_buffer(self) -> memoryview:
        return memoryview(self._buffer)

    def commit_page(self) -> None:
        self._pool.write_page(self._places[self.received_pages], memoryview(self._buffer))
        self.received_pages += 1

    def flush(self) -> None:
        """Do nothing, because no caller waits for single pages."""


class PoolPageSource:
    """Implements PageSource, except for lending memory. Pages are copied, because stored content must not change during
    a move."""

    fd = -1

    def __init__(self, pool: PageBytes, places: list[int]) -> None:
        self._pool = pool
        self._places = places
        self.remaining: list[int] = []

    def request_pages(self, indices: Sequence[int]) -> None:
        self.remaining = list(indices)

    def is_ready(self, index: int) -> bool:
        return True

    def page_body(self, index: int) -> memoryview:
        return memoryview(bytes(self._pool.read_page(self._places[index])))

    def page_offset(self, index: int) -> int:
        raise NotImplementedError("it is in nobody's file")

    def release_page(self, index: int) -> None:
        self.remaining.remove(index)
