"""Tier: a backend with its threads and queues, so that a slow backend delays no caller. Tier knows nothing of leases or
memory.

Reads and writes have threads of their own. A write waits while reads are under way, but only for a bounded time. Both
queues are bounded: a page that finds no room is dropped; a dropped read goes back to the caller, which may ask the next
tier. Every page is checked when it is read. It is not checked when it is written, since the store checked it on
arrival; later damage is found at the next read. If there are keys, a page gets its MAC when it is written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire_common.pages import PageCorrupt, PageUnauthenticated, authenticate_page, check_page, split_page
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.metrics import histogram
from quire_kvstore.tiers.backend import PageJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.kv.page_mac import PageMac
    from quire_common.pages import PageKey
    from quire_kvstore.tiers.backend import TierBackend

log = get_logger(__name__)
MAINTENANCE_S = 0.1
_operation_s = histogram(
    "quire_kvstore_tier_operation_seconds", "Read or write of a batch of pages.", ("medium", "operation")
)
# The longest that a write waits for reads to end.
_MAX_WRITE_DELAY_S = 0.05
_FLUSH_TIMEOUT_S = 30.0
# Pages are written when they are stored, when lookups have found them so often, or never.
WRITE_MODES: dict[str, int | None] = {"write-through": 0, "selective": 2, "off": None}


@dataclass(frozen=True)
class TierSettings:
    """`write_at`: see WRITE_MODES."""

    write_at: int | None
    read_threads: int
    write_threads: int
    read_queue: int
    write_queue: int


@dataclass(eq=False)
class _WriteRun:
    """Pages that were offered together, and how many of them are still to be written."""

    keys: Sequence[PageKey]
    unwritten: int


class _PageWrite(NamedTuple):
    job: PageJob
    run: _WriteRun


class TierCallbacks(Protocol):
    """The receiver of a tier's reads and the source of its writes. The tier's threads call it, and `Tier.start` may
    report removed or found pages to it; no lock is held."""

    def allocate_buffer(self, job: PageJob, size: int) -> memoryview | None:
        """Return memory for the framed page; None if no lookup waits for the page any more, RAM has the page by now, or
        there is no room. With None, the job has ended."""

    def on_page_read(self, job: PageJob) -> None:
        """Take a page that the backend has read into its buffer. The page is intact."""

    def on_page_missed(self, job: PageJob) -> None:
        """Note that this tier does not have the page. The page's buffer, if it has one, is no longer used."""

    def borrow_page(self, key: PageKey) -> contextlib.AbstractContextManager[memoryview | None]:
        """Return the framed page, which stays in memory meanwhile; None if it is no longer there."""

    def on_pages_removed(self, keys: Sequence[PageKey]) -> None:
        """Note that the backend no longer holds these pages."""

    def on_pages_found(self) -> None:
        """Note that the backend has found pages of an earlier process."""


class Tier:
    """One tier. `request_reads`, `offer_pages` and `touch` return at once; only the owner calls the other methods."""

    def __init__(self, backend: TierBackend, settings: TierSettings, mac: PageMac | None = None) -> None:
        self.backend = backend
        self._mac = mac
        self.write_at = settings.write_at
        self._settings = settings
        lock = threading.Lock()
        self._lock = lock
        self._to_read = threading.Condition(lock)
        self._to_write = threading.Condition(lock)
        self._write_done = threading.Condition(lock)
        """Something was written, or the threads are to end."""
        self._reads: deque[PageJob] = deque()
        self._writes: deque[_PageWrite] = deque()
        self._reading = self._writing = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self, callbacks: TierCallbacks) -> None:
        """Open the backend, and start the threads that read, write and maintain it until `close`. `callbacks` gets the
        results of reads, supplies the pages to write, and learns which pages are removed or found. An error of the
        backend's `open` passes on, and no thread is started."""
        self.backend.call_back(callbacks.on_pages_removed, callbacks.on_pages_found)
        self.backend.open()
        name, settings = self.backend.name, self._settings
        loops: list[tuple[str, Callable[[TierCallbacks], None], int]] = [
            ("read", self._read_loop, settings.read_threads),
            ("write", self._write_loop, settings.write_threads),
            ("maintenance", self._maintenance_loop, 1),
        ]
        for what, loop, count in loops:
            for number in range(count):
                thread = threading.Thread(target=loop, args=(callbacks,), name=f"{name}-{what}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def may_have(self, key: PageKey) -> bool:
        """Whether a read may find the page."""
        return self.backend.may_have(key)

    def request_reads(self, jobs: Sequence[PageJob]) -> Sequence[PageJob]:
        """Queue the first jobs, as many as the queue has room for; `TierCallbacks` tells how each read ends, unless
        `close` drops it. Returns the other jobs, after `close` all of them; these count as dropped."""
        with self._lock:
            room = 0 if self._stopping else max(self._settings.read_queue - len(self._reads), 0)
            self._reads.extend(jobs[:room])
            self._to_read.notify(len(jobs[:room]))
        if jobs[room:]:
            self.backend.counts.add(dropped=len(jobs[room:]))
        return jobs[room:]

    def offer_pages(self, keys: Sequence[PageKey]) -> None:
        """Queue the pages of a run to be written, in this order, which begins with the head of the prefix. When their
        turn comes, the backend gets those that are still in RAM, and may refuse them (see `_write`). Each has a stamp
        1 ns before that of the page ahead of it, so that the head counts as used last. Pages for which the queue has
        no room, after `close` all of them, are dropped and counted."""
        now = time.time_ns()
        jobs = [PageJob(key, now - index) for index, key in enumerate(keys)]
        with self._lock:
            room = 0 if self._stopping else max(self._settings.write_queue - len(self._writes), 0)
            run = _WriteRun(keys[:room], len(jobs[:room]))
            self._writes.extend(_PageWrite(job, run) for job in jobs[:room])
            self._to_write.notify(len(jobs[:room]))
        if jobs[room:]:
            self.backend.counts.add(dropped=len(jobs[room:]))

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Note that a run of pages was used. The tail of a prefix is to be evicted before its head."""
        self.backend.touch(reversed(keys))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was offered is written or dropped; returns False if that takes longer than
        `timeout_s`."""
        with self._lock:
            return self._write_done.wait_for(lambda: not self._writes and not self._writing, timeout_s)

    def check_integrity(self) -> None:
        """Wait for queued writes, up to 30 s, then, even if some are left, raise AssertionError if the backend
        contradicts itself. Not to be called while a lookup is under way."""
        self.flush(_FLUSH_TIMEOUT_S)
        self.backend.check_integrity()

    def close(self, timeout_s: float) -> bool:
        """Stop the threads, drop queued jobs without an answer, and close the backend. Waits up to `timeout_s`; returns
        False if a thread still hangs in the backend, which is then not closed."""
        with self._lock:
            self._stopping = True
            self._reads.clear()
            self._writes.clear()
            for condition in (self._to_read, self._to_write, self._write_done):
                condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.backend.close()
        return True

    def _read_loop(self, callbacks: TierCallbacks) -> None:
        """Take queued reads in batches of up to `read_batch` and read them, until the tier is closed. Writers are woken
        when no read is left. Runs in each read thread."""
        while True:
            with self._lock:
                self._to_read.wait_for(lambda: self._reads or self._stopping)
                if self._stopping:
                    return
                count = min(len(self._reads), self.backend.read_batch)
                batch = [self._reads.popleft() for _ in range(count)]
                self._reading += 1
            try:
                self._read(batch, callbacks)
            finally:
                with self._lock:
                    self._reading -= 1
                    if not self._reads and not self._reading:
                        self._to_write.notify_all()

    def _read(self, batch: list[PageJob], callbacks: TierCallbacks) -> None:
        """Read a batch from the backend and check each page: intact pages go to `on_page_read`, and their bytes are
        counted; the others go to `on_page_missed`. Damaged pages are removed from the backend. A job that gets no
        buffer has ended and is not answered. Jobs that the backend leaves unanswered are missed. If the backend raises,
        or a callback that it calls, that is logged and counted."""
        open_jobs = set(batch)

        def allocate_buffer(job: PageJob, size: int) -> memoryview | None:
            """Ask the callbacks for the job's buffer. A job that gets none has ended."""
            view = callbacks.allocate_buffer(job, size)
            if view is None:
                open_jobs.discard(job)
            return view

        def deliver(job: PageJob, framed: memoryview | None) -> None:
            """Check what the backend has read for a job, and answer the job with the intact page or with a miss. An
            intact page's bytes are counted; a damaged page is removed from the backend. Does nothing for a job that has
            ended."""
            if job not in open_jobs:
                return  # it has had its answer
            intact = framed is not None and self._is_intact(job.key, framed)
            if framed is not None and not intact:
                self.backend.discard(job.key)
            # Not before: a job whose check fails in an unforeseen way still gets its answer, below.
            open_jobs.discard(job)
            if framed is not None and intact:
                self.backend.counts.add(bytes_read=len(framed))
                callbacks.on_page_read(job)
            else:
                callbacks.on_page_missed(job)

        try:
            with _operation_s.labels(self.backend.name, "read").time():
                self.backend.read(batch, allocate_buffer, deliver)
        except Exception:
            log.exception("a read failed in an unforeseen way", medium=self.backend.name)
            self.backend.counts.add(errors=1)
        for job in batch:
            if job in open_jobs:
                callbacks.on_page_missed(job)

    def _write_loop(self, callbacks: TierCallbacks) -> None:
        """Take queued writes in batches of up to `write_batch` and write them, until the tier is closed. A batch waits
        for reads to end, for 50 ms at most. When all pages of an offer are done, they are refreshed in the backend from
        the last to the first; if that raises, it is logged and counted, and further offers of the batch are not
        refreshed. Wakes the waiters of `_write_done` when no write is left. Runs in each write thread."""
        while True:
            with self._lock:
                self._to_write.wait_for(lambda: self._writes or self._stopping)
                self._to_write.wait_for(
                    lambda: self._stopping or not (self._reads or self._reading), _MAX_WRITE_DELAY_S
                )
                if self._stopping:
                    return
                count = min(len(self._writes), self.backend.write_batch)
                batch = [self._writes.popleft() for _ in range(count)]
                self._writing += 1
            try:
                if batch:
                    self._write([write.job for write in batch], callbacks)
                for run in self._finish_writes(batch):
                    self.backend.refresh(reversed(run.keys))
            except Exception:
                log.exception("a refresh failed in an unforeseen way", medium=self.backend.name)
                self.backend.counts.add(errors=1)
            finally:
                with self._lock:
                    self._writing -= 1
                    if not self._writes and not self._writing:
                        self._write_done.notify_all()

    def _finish_writes(self, batch: Sequence[_PageWrite]) -> list[_WriteRun]:
        """Subtract the batch's pages, which were written or dropped, from their runs. Returns each run that has no page
        left to write, so that its pages can be refreshed in the backend."""
        with self._lock:
            for write in batch:
                write.run.unwritten -= 1
            return [run for run in dict.fromkeys(write.run for write in batch) if not run.unwritten]

    def _write(self, batch: list[PageJob], callbacks: TierCallbacks) -> None:
        """Write the batch's pages that are still in RAM. If there are keys, a page without a MAC under the first key
        first gets one, in its header in RAM. The pages of the batch that have left the RAM, or that the backend does
        not keep, are counted as dropped. If the backend raises, that is logged and counted, and all pages of the batch
        count as dropped."""
        kept = 0
        try:
            with contextlib.ExitStack() as borrowed:
                views = [(job, borrowed.enter_context(callbacks.borrow_page(job.key))) for job in batch]
                pages = [(job, framed) for job, framed in views if framed is not None]
                if self._mac is not None:
                    for _, framed in pages:
                        authenticate_page(*split_page(framed), self._mac)
                with _operation_s.labels(self.backend.name, "write").time():
                    kept = self.backend.write(pages) if pages else 0
        except Exception:
            log.exception("a write failed in an unforeseen way", medium=self.backend.name)
            self.backend.counts.add(errors=1)
        if len(batch) > kept:
            self.backend.counts.add(dropped=len(batch) - kept)

    def _is_intact(self, key: PageKey, framed: memoryview) -> bool:
        """Return whether a framed page matches its key and checksum and, if there is a MAC key, its MAC; if not, that
        is logged and counted as corrupt. A page without a valid MAC also counts as unauthenticated."""
        try:
            check_page(framed, key, mac=self._mac).release()
        except PageUnauthenticated as error:
            log.warning("a page is not authentic", medium=self.backend.name, reason=str(error))
            self.backend.counts.add(corrupt=1, unauthenticated=1)
            return False
        except PageCorrupt as error:
            log.warning("a page is corrupt", medium=self.backend.name, reason=str(error))
            self.backend.counts.add(corrupt=1)
            return False
        return True

    def _maintenance_loop(self, callbacks: TierCallbacks) -> None:
        """Call the backend's `maintain` every `MAINTENANCE_S`, until the tier is closed. An exception is logged, and
        the loop goes on."""
        while True:
            with self._lock:
                if self._write_done.wait_for(lambda: self._stopping, MAINTENANCE_S):
                    return
            try:
                self.backend.maintain()
            except Exception:
                log.exception("a medium cannot be tended", medium=self.backend.name)
