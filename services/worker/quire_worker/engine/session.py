"""Session: one attached scheduler, as the model thread and the writer see it.

The model thread fills the outbox; the writer empties it and joins Reports that follow one another within a millisecond,
so that short steps do not cost a message each.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.credit import Report, WorkerHello
from quire_worker.engine.report_draft import can_merge, merge_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_common.errors import QuireError

REPORT_INTERVAL_S = 0.001
_MAX_MERGED = 64


@dataclass(frozen=True, slots=True)
class Flush:
    """The engine has nothing more to do before the next Grant: waiting would only delay the scheduler."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over; with an error where it was not the scheduler's wish."""

    error: QuireError | None = None


class Session:
    """Made by the servicer, given to the run loop, which answers with a hello and then Reports."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[WorkerHello | Report | Flush | Closed] = queue.SimpleQueue()

    def frames(self, clock: Callable[[], float] = time.monotonic) -> Iterator[WorkerHello | Report]:
        """What to send, until the session is closed; raises the QuireError that it was closed with."""
        held: list[Report] = []
        last_sent = -REPORT_INTERVAL_S
        while True:
            item = self._next(last_sent + REPORT_INTERVAL_S - clock() if held else None)
            if isinstance(item, Report) and (not held or can_merge(held[-1], item)) and len(held) < _MAX_MERGED:
                held.append(item)
                continue
            if held:
                yield merge_reports(held)
                held, last_sent = [], clock()
            if isinstance(item, Report):
                held.append(item)
            elif isinstance(item, WorkerHello):
                yield item
            elif isinstance(item, Closed):
                if item.error is not None:
                    raise item.error
                return

    def _next(self, timeout_s: float | None) -> WorkerHello | Report | Flush | Closed:
        """The next item; a Flush when none came in time."""
        try:
            if timeout_s is None:
                return self.outbox.get()
            if timeout_s <= 0:
                return self.outbox.get_nowait()
            return self.outbox.get(timeout=timeout_s)
        except queue.Empty:
            return Flush()
