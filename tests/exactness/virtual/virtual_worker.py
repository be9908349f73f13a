"""A worker in virtual time: the run loop's turns around a real Engine, between two wires."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2
from quire_common.credit import Finish, MoveKind, Report, decode_grant, encode_report
from quire_worker.engine.run.report_bundle import ReportBundle
from quire_worker.engine.run.session import REPORT_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from quire_common.credit import Epoch, Grant
    from quire_worker.engine.engine import Engine
    from tests.exactness.events import Events
    from tests.exactness.virtual.virtual_device import VirtualDevice
    from tests.exactness.virtual.virtual_time import VirtualTime


class VirtualWorker:
    """Takes Grants as bytes and sends Reports as bytes."""

    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        engine: Engine,
        device: VirtualDevice,
        events: Events,
        *,
        think_us: int,
        coalesce: bool,
    ) -> None:
        self.engine = engine
        self._time = time
        self._rng = rng
        self._device = device
        self._send: Callable[[bytes], None] = lambda frame: None
        self._events = events
        self._think_us = think_us
        self._interval_us = round(REPORT_INTERVAL_S * 1e6) if coalesce else 0
        self._inbox: deque[Grant] = deque()
        self._turn_due = False
        self._bundle = ReportBundle()
        self._used: set[int] = set()

    def attached(self, send: Callable[[bytes], None]) -> None:
        """A scheduler is there: what came of the one before, or was to go to it, is forgotten."""
        self._send = send
        self._inbox.clear()
        self._bundle = ReportBundle()
        self._used.clear()

    def granted(self, epoch: Epoch, frame: bytes) -> None:
        """A Grant arrives on the stream of an epoch."""
        if epoch == self.engine.epoch:
            self._inbox.append(decode_grant(worker_pb2.Grant.FromString(frame)))
            self.wake()

    def wake(self) -> None:
        """There may be something to do; the model thread may be slow to notice."""
        if not self._turn_due:
            self._turn_due = True
            self._time.after(int(self._rng.integers(0, self._think_us + 1)), self._turn)

    def _turn(self) -> None:
        """As RunLoop's: everything that came in, then launches, then one Report, until there is nothing to do."""
        self._turn_due = False
        busy = True
        while busy:
            while self._inbox:
                grant = self._inbox.popleft()
                self._watch(grant)
                self.engine.apply(grant)
            busy = False
            while self.engine.launch():
                busy = True
            if (report := self.engine.collect()) is not None:
                busy = True
                self._tell(report)
        if self._rng.random() < 0.1:
            self.engine.check_integrity()

    def _tell(self, report: Report) -> None:
        """Reports that follow closely travel as one, as the session's writer has it."""
        self._count(report)
        if not self._bundle.has_room_for(report):
            self._flush()
        self._bundle.add(report)
        if not self._interval_us:
            self._flush()
        elif len(self._bundle) == 1:
            self._time.after(int(self._rng.integers(0, self._interval_us)), self._flush)

    def _flush(self) -> None:
        if not len(self._bundle):
            return
        self._events["reports merged"] += len(self._bundle) > 1
        report = self._bundle.take_report()
        self._send(encode_report(report).SerializeToString())
        if self._rng.random() < 0.05:
            self._send(encode_report(_heartbeat(report)).SerializeToString())

    def _watch(self, grant: Grant) -> None:
        """Count what a Grant does to a device that is busy."""
        flying = self._device.in_flight
        size = self.engine.spec.page_size
        new = {int(page) for start in grant.start for page in start.pages[0][start.cached_len // size :]}
        new |= set(grant.grow_page.tolist())
        ready = self.engine.residents.states.ready
        hits = [int(page) for start in grant.start for page in start.pages[0][: start.cached_len // size]]
        self._events["hits in the making"] += sum(ready[page] < size for page in hits)
        new |= {int(page) for move in grant.move if move.kind is MoveKind.LOAD for page in move.device_page}
        self._check_fences(new)
        self._events["pages reused in flight"] += bool(flying) and bool(new & self._used)
        self._used |= new
        self._events["stopped in flight"] += bool(flying) and bool(len(grant.stop_slot))
        self._events["starts on loads"] += sum(start.cached_len > 0 for start in grant.start)
        self._events["starts"] += len(grant.start)

    def _check_fences(self, new: set[int]) -> None:
        """No page is handed out that a step in flight may still write to."""
        touched = new & {int(page) for batch in self._device.in_flight for page in batch.page_table.flat}
        assert not touched, f"pages {touched} are granted while a step in flight may write to them"

    def _count(self, report: Report) -> None:
        self._events["steps"] += report.steps
        self._events["two in flight"] += report.in_flight > 0 and report.steps > 0
        self._events["stalled"] += len(report.stalled_slot) > 0
        self._events["spares"] += report.spare > 0
        self._events["ended by a stop id"] += int((report.finish == Finish.STOP).sum())
        self._events["ended by length"] += int((report.finish == Finish.LENGTH).sum())
        self._events["rows lost"] += len(report.error)
        self._events["prefill chunks"] += len(report.prefill_slot)


def _heartbeat(said: Report) -> Report:
    """A sign of life: the last acknowledgement again."""
    return Report(
        said.epoch,
        first_step=said.first_step + said.steps,
        retired=said.retired,
        in_flight=said.in_flight,
        running=said.running,
        spare=said.spare,
        heartbeat=True,
    )
