"""Session: one attached scheduler, as the reader, the model thread and the writer see it.

The model thread puts Reports into the outgoing queue, and the writer takes them out. The writer merges Reports that
follow within a millisecond, so that short steps do not cost a message each. It sends heartbeats while the engine has
nothing to report. Both directions are bounded: the reader waits while many Grants wait to be applied, and a scheduler
that does not read loses its session.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.credit import Report, WorkerHello
from quire_worker.engine.run.report_bundle import ReportBundle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_common.errors import QuireError

REPORT_INTERVAL_S = 0.001
# Half of what a scheduler is promised, since a busy host may be late with it.
HEARTBEAT_S = 0.25
MAX_GRANTS_WAITING = 64
MAX_REPORTS_WAITING = 4096


@dataclass(frozen=True, slots=True)
class Flush:
    """The engine has nothing more to do before the next Grant: waiting would only delay the scheduler."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over. It has an error, unless the scheduler itself ended the session."""

    error: QuireError | None = None


class Session:
    """The servicer gets it from the run loop, which answers with a hello and then with Reports."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[WorkerHello | Report | Flush | Closed] = queue.SimpleQueue()
        self._room = threading.Semaphore(MAX_GRANTS_WAITING)
        self._closed = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether the session was closed."""
        return self._closed.is_set()

    @property
    def is_slow(self) -> bool:
        """Whether the scheduler has left too many Reports unread."""
        return self.outgoing.qsize() > MAX_REPORTS_WAITING

    def close(self, error: QuireError | None) -> None:
        """End the session: the writer gets `Closed`, with the error, as its last item, and `wait_for_room` waits no
        longer. From any thread."""
        self._closed.set()
        self.outgoing.put(Closed(error))

    def wait_for_room(self) -> bool:
        """Wait until another Grant may be queued; returns False if the session is over. Called by the reader before
        each Grant."""
        while not self._closed.is_set():
            if self._room.acquire(timeout=HEARTBEAT_S):
                return True
        return False

    def applied(self) -> None:
        """Make room for another Grant. Called by the model thread when it has taken one."""
        self._room.release()

    def frames(self, clock: Callable[[], float] = time.monotonic) -> Iterator[WorkerHello | Report]:
        """Yield the frames for the scheduler, and block between them: the hello, then Reports. Reports that come within
        1 ms of the last frame are merged, as far as ReportBundle allows; a Flush sends them at once. After the hello, a
        heartbeat comes whenever no frame was sent for 0.25 s. Ends when the session is closed, or raises the QuireError
        with which it was closed; Reports queued before that still come."""
        bundle = ReportBundle()
        said: Report | None = None
        sent_s = clock() - REPORT_INTERVAL_S
        while True:
            wait_s = REPORT_INTERVAL_S if len(bundle) else HEARTBEAT_S if said else None
            item = self._next(None if wait_s is None else sent_s + wait_s - clock())
            if isinstance(item, Report) and bundle.has_room_for(item):
                bundle.add(item)
                continue
            if len(bundle):
                said, sent_s = bundle.take_report(), clock()
                yield said
            if isinstance(item, Report):
                bundle.add(item)
            elif isinstance(item, WorkerHello):
                said, sent_s = Report(epoch=item.epoch), clock()
                yield item
            elif isinstance(item, Closed):
                if item.error is not None:
                    raise item.error
                return
            elif said is not None and clock() - sent_s >= HEARTBEAT_S:
                sent_s = clock()
                yield _heartbeat(said)

    def _next(self, timeout_s: float | None) -> WorkerHello | Report | Flush | Closed:
        """Wait `timeout_s` seconds for the next outgoing item, without limit if that is None; returns a Flush if none
        comes in time."""
        try:
            if timeout_s is None:
                return self.outgoing.get()
            if timeout_s <= 0:
                return self.outgoing.get_nowait()
            return self.outgoing.get(timeout=timeout_s)
        except queue.Empty:
            return Flush()


def _heartbeat(said: Report) -> Report:
    """Return a Report without content that repeats the acknowledgement and the counts of the last one."""
    return Report(
        epoch=said.epoch,
        first_step=said.first_step + said.steps,
        retired=said.retired,
        in_flight=said.in_flight,
        running=said.running,
        spare=said.spare,
        stalled_slot=said.stalled_slot,
        draining=said.draining,
        heartbeat=True,
    )
