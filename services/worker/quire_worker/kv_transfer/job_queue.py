"""JobQueue: the loads and the stores in the KV transfer agent's process. Loads run one after another on one thread,
stores on another.

A queue hands pages over through the ring: it names to the engine the slots that it has filled or emptied, and the
engine does the same. After a cancellation, no job of an earlier generation is begun, and a running one ends at its next
page. The engine limits the number of moves that wait here.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_common.kv.kv_client import TransferCancelled
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.tracing import extract, record_span
from quire_worker.kv_transfer.wire import AgentFrameKind, transport_code
from quire_worker.side_process.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.credit import PageMove
    from quire_worker.kv_transfer.kv_connector import KvConnector
    from quire_worker.kv_transfer.ring import Ring

    Send = Callable[[Frame], None]

log = get_logger(__name__)
# Small pages are announced together, since each frame wakes the engine's threads.
BATCH_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Job:
    """A move, with the generation of moves to which it belongs."""

    move: PageMove
    generation: int
    submitted_ns: int

    @property
    def number(self) -> int:
        """The engine's number of the job's move."""
        return self.move.id


class JobQueue(ABC):
    """The common base of LoadQueue and StoreQueue. `start_job`, `cancel_before`, `cancel_job` and `close` are called
    from the process's main thread."""

    def __init__(self, name: str, connector: KvConnector, ring: Ring, send: Send) -> None:
        self._connector = connector
        self._ring = ring
        self._send = send
        self._batch = max(1, BATCH_BYTES // ring.page_bytes)
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._generation = 0
        self._cancelled_jobs: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run_jobs, name=f"mover-{name}", daemon=True)
        self._thread.start()

    def start_job(self, job: Job) -> None:
        """Queue the job. The queue's thread runs jobs one by one, in this order."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel_before(self, generation: int) -> None:
        """Cancel all jobs of generations before this one. Waiting ones are skipped; a running one stops at its next
        page."""
        with self._changed:
            self._generation = max(self._generation, generation)
            self._changed.notify_all()

    def cancel_job(self, number: int) -> None:
        """Cancel this job: if it waits, it is skipped; if it runs, it stops at its next page. Does nothing if the queue
        does not have it."""
        with self._changed:
            if any(job is not None and job.number == number for job in (self._current, *self._jobs)):
                self._cancelled_jobs.add(number)
                self._changed.notify_all()

    def close(self) -> None:
        """Cancel all jobs and end the thread; does not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_cancelled(self, job: Job) -> bool:
        return self._closed or job.generation < self._generation or job.number in self._cancelled_jobs

    def _wait(self, job: Job, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; the caller holds the lock. Raises TransferCancelled if the job was cancelled or is
        over."""
        self._changed.wait_for(lambda: self._is_cancelled(job) or self._current is not job or ready())
        if self._is_cancelled(job) or self._current is not job:
            raise TransferCancelled

    def _run_jobs(self) -> None:
        """Carry out jobs in order, on the queue's thread, until `close`. Jobs that were cancelled while they waited are
        skipped, and no ENDED is sent for them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    return
                job = self._jobs.popleft()
                if self._is_cancelled(job):
                    self._cancelled_jobs.discard(job.number)
                    continue
                self._current = job
            self._run(job)

    def _run(self, job: Job) -> None:
        """Carry out one job, then clean up by `_on_job_end`, trace it, and send ENDED with how many of its pages are
        whole (0 if `_transfer` raises, as after a cancellation). Its errors are logged, not raised."""
        pages = 0
        try:
            pages = self._transfer(job)
        except TransferCancelled:
            log.info("a move was abandoned", kind=job.move.kind.name)
        except QuireError as error:
            log.warning("a move failed", kind=job.move.kind.name, code=error.code, error=error.message)
        except Exception:
            log.exception("a move failed", kind=job.move.kind.name)
        with self._changed:
            self._current = None
            self._cancelled_jobs.discard(job.number)
            self._on_job_end(job)
            self._changed.notify_all()
        trace_move(job, pages)  # before the engine knows: it may close then
        self._send(ended_frame(job, pages, self._connector.transport))

    @abstractmethod
    def _transfer(self, job: Job) -> int:
        """Do the job; returns how many pages, from its first, are whole at their destination."""

    @abstractmethod
    def _on_job_end(self, job: Job) -> None:
        """Clean up after a job; called with the lock held."""


def ended_frame(job: Job, pages: int, transport: str) -> Frame:
    """Return the frame that ends a job. It states how many pages are whole, and which transport carried them."""
    return Frame.of(AgentFrameKind.ENDED, job.generation, job.number, [pages, transport_code(transport)])


def trace_move(job: Job, pages: int) -> None:
    """Record the move's span, from its submission until now, with the counts of pages that came and that were wanted.
    An error is logged and not raised, since the move's end must still be reported."""
    move = job.move
    figures = {"quire.pages": pages, "quire.pages_wanted": len(move.hashes)}
    try:
        record_span(
            f"{move.kind.name.lower()}_pages",
            extract(context_to_pb(move.context)),
            job.submitted_ns,
            time.time_ns(),
            {**figures, "quire.request_id": move.context.request_id},
        )
    except Exception:
        log.exception("a move was not traced", kind=move.kind.name)
