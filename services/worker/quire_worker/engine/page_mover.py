"""PageMover: stores pages into the kvstore and loads them from it, on threads of its own.

Loads and stores have a bounded queue each, so that a slow store delays no load; a full queue refuses. Every page that
arrives is checked against its key before a byte of it is written. Nothing that fails here is an error to anyone: a move
ends with the number of pages that are whole. Knows nothing of slots or of who waits for the pages.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire_common.credit import MoveKind
from quire_common.errors import QuireError
from quire_common.pages import PageCorrupt, PageRun, check_page
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.tracing import extract, record_span
from quire_worker.engine.moves import MoveResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import KvGroup, PageMove
    from quire_common.kv_client import KvClient
    from quire_worker.engine.ports import PageBytes

MAX_QUEUED = 128
log = get_logger(__name__)


class _Cancelled(Exception):
    """The run that asked for the move is over."""


@dataclass(frozen=True, slots=True)
class _Job:
    move: PageMove
    generation: int
    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    started_ns: int = field(default_factory=time.time_ns)


class Carrier(Protocol):
    """Where pages go and come from."""

    def store(self, move: PageMove, read: Callable[[int], bytes]) -> int:
        """Store the move's pages; `read(index)` gives a body. Returns how many are there now. May raise QuireError."""

    def load(self, move: PageMove, write: Callable[[int, memoryview], None]) -> int:
        """Bring the move's pages, in order, and `write(index, body)` each one that is what its key says. Returns how
        many came, up to the first that did not. May raise QuireError."""


class KvStoreCarrier:
    """The kvstore's portable data path."""

    def __init__(self, client: KvClient, namespace: bytes, group: KvGroup) -> None:
        self._client = client
        self._namespace = namespace
        self._group = group

    def store(self, move: PageMove, read: Callable[[int], bytes]) -> int:
        """Pages that the store has already count as stored."""
        run = PageRun(self._namespace, move.group, move.hashes)
        outcome = self._client.put_pages(
            run, self._group.dtype, self._group.page_bytes, read, context=context_to_pb(move.context)
        )
        return len(run) - (outcome.wanted - outcome.stored)

    def load(self, move: PageMove, write: Callable[[int, memoryview], None]) -> int:
        """The lease's first pages are those that the move names."""
        run, arrived = PageRun(self._namespace, move.group, move.hashes), 0
        pages = self._client.get_pages(move.lease, range(len(run)), context=context_to_pb(move.context))
        try:
            for index, framed in pages:
                if index != arrived:
                    break
                write(index, check_page(framed, run.key(index), self._group.dtype, self._group.page_bytes))
                arrived += 1
        except (PageCorrupt, QuireError) as error:
            log.warning("a load ended early", arrived=arrived, wanted=len(run), error=str(error))
        return arrived


class PageMover:
    """A Mover over a Carrier. `wake` is called, from a mover's thread, when a move has ended."""

    def __init__(self, carrier: Carrier, pool: PageBytes, max_queued: int = MAX_QUEUED) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._carrier = carrier
        self._pool = pool
        self._lock = threading.Lock()
        self._generation = 0
        self._ended: list[MoveResult] = []
        self._queues: dict[MoveKind, queue.Queue[_Job | None]] = {
            kind: queue.Queue(max_queued) for kind in (MoveKind.LOAD, MoveKind.STORE)
        }
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"mover-{kind.name.lower()}", daemon=True)
            for kind, jobs in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, move: PageMove) -> bool:
        """See Mover."""
        jobs = self._queues.get(move.kind)
        if jobs is None:
            return False
        try:
            jobs.put_nowait(_Job(move, self._generation))
        except queue.Full:
            return False
        return True

    def finished(self) -> list[MoveResult]:
        """See Mover."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def cancel(self) -> None:
        """See Mover. Moves in flight go on talking to the store, but touch no page any more and commit nothing."""
        with self._lock:
            self._generation += 1
            self._ended = []

    def close(self) -> None:
        """Cancel and end the threads; one that waits for the store is left to its time limit."""
        self.cancel()
        for jobs in self._queues.values():
            while True:  # the queue may be full of jobs that are void now
                try:
                    jobs.put_nowait(None)
                    break
                except queue.Full:
                    jobs.get_nowait()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _work(self, jobs: queue.Queue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            if job.generation == self._generation:
                self._carry(job)

    def _carry(self, job: _Job) -> None:
        move, pages = job.move, 0
        try:
            if move.kind == MoveKind.LOAD:
                pages = self._carrier.load(move, lambda index, body: self._write(job, index, body))
            else:
                pages = self._carrier.store(move, lambda index: self._read(job, index))
        except _Cancelled:
            return
        except QuireError as error:
            log.warning("a move failed", kind=move.kind.name, code=error.code, error=error.message)
        except Exception:
            log.exception("a move failed", kind=move.kind.name)
        us = (time.perf_counter_ns() - job.submitted_ns) // 1000
        with self._lock:
            if job.generation == self._generation:
                self._ended.append(MoveResult(move.id, pages == len(move.device_page), pages, us))
        self.wake()
        _trace(job, pages)

    def _read(self, job: _Job, index: int) -> bytes:
        """A copy, taken while the run is still on: what is stored under a name must be what was computed for it."""
        with self._lock:
            self._check(job)
            return bytes(self._pool.read_page(int(job.move.device_page[index])))

    def _write(self, job: _Job, index: int, body: memoryview) -> None:
        with self._lock:
            self._check(job)
            self._pool.write_page(int(job.move.device_page[index]), body)

    def _check(self, job: _Job) -> None:
        if job.generation != self._generation:
            raise _Cancelled


def _trace(job: _Job, pages: int) -> None:
    """The move's span. Whatever breaks here, the thread goes on: others wait for its moves."""
    move = job.move
    figures = {"quire.pages": pages, "quire.pages_wanted": len(move.device_page)}
    try:
        record_span(
            "load_pages" if move.kind == MoveKind.LOAD else "store_pages",
            extract(context_to_pb(move.context)),
            job.started_ns,
            time.time_ns(),
            {**figures, "quire.request_id": move.context.request_id},
        )
    except Exception:
        log.exception("a move was not traced", kind=move.kind.name)
