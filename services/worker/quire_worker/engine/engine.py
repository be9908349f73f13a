"""Engine: applies Grants at step boundaries, launches steps, and reports their outcomes to the scheduler.

A run consists of `apply(grant)`, `launch()` until it returns False, and `collect()` until it returns None. The engine
has no thread and no gRPC.

Up to `depth` steps are in flight. The engine forms the next step while the last one runs, since the device feeds
sampled tokens back by itself. So the positions in the slots are ahead of the steps that have completed. A step may
still run for a sequence that has ended in the step before; see step_completion.py.

A Grant is retired when all steps launched before it was applied have completed. A Report acknowledges it then. With
nothing in flight, every applied Grant is retired, and the engine reports this even without a step.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import TYPE_CHECKING

from quire_common.credit import Epoch, Report, StepTiming
from quire_worker.engine.grant_rules import GrantRules, check_follows
from quire_worker.engine.in_flight_step import InFlightStep
from quire_worker.engine.move_manager import MoveManager
from quire_worker.engine.ports import NullObserver
from quire_worker.engine.report_draft import ReportDraft
from quire_worker.engine.resident_slots import ResidentSlots
from quire_worker.engine.step_builder import StepBuilder
from quire_worker.engine.step_completion import complete_step
from quire_worker.engine.step_schedule import StepScheduler
from quire_worker.engine.transfer_agent import NoTransferAgent

if TYPE_CHECKING:
    from quire_common.credit import Budget, Grant
    from quire_worker.engine.ports import Device, GrammarMatcher, Observer, StepOutcome
    from quire_worker.engine.spec import EngineSpec
    from quire_worker.engine.transfer_agent import KvTransferAgent

DEPTH = 2
_UNLIMITED = -1


class Engine:
    """The engine of one replica. All methods belong to one thread, the model thread. Other threads may read `steps`,
    `in_flight`, `epoch` and the number of started slots."""

    def __init__(
        self,
        spec: EngineSpec,
        device: Device,
        transfer_agent: KvTransferAgent | None = None,
        observer: Observer | None = None,
        depth: int = DEPTH,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.spec = spec
        self.epoch = Epoch(secrets.randbits(64), 1)
        self._device = device
        self._depth = depth
        self._observer: Observer = NullObserver() if observer is None else observer
        self._draft = ReportDraft()
        self.residents = ResidentSlots(spec, self._observer, matcher)
        self._moves = MoveManager(
            self.residents, NoTransferAgent() if transfer_agent is None else transfer_agent, self._draft, self._observer
        )
        self._rules = GrantRules(self.residents, self._moves, self._draft)
        self._scheduler = StepScheduler(self.residents.table, spec.max_num_seqs)
        self._builder = StepBuilder(self.residents.table)
        self._in_flight: deque[InFlightStep] = deque()
        self._outcomes: deque[StepOutcome] = deque()
        self._launched = 0
        self._applied = 0
        self._acknowledged = 0
        self._arrival_us = 0
        self._budget: Budget | None = None
        self._steps_left = 0
        self._draining = False
        self._to_announce = False

    @property
    def steps(self) -> int:
        """Number of the last step that is over: its Report was made, or its run has ended."""
        return self.residents.settled

    @property
    def in_flight(self) -> int:
        """Number of steps that were launched and are not yet reported."""
        return len(self._in_flight)

    def begin_run(self) -> Epoch:
        """Begin a new run, for another scheduler or after the last one has gone. Blocks until no step runs, so that
        none writes to a page later; then forgets all slots, pages, moves and the budget. Returns the new epoch, in
        which Grants count from 1; step numbers go on. Raises the errors of `Device.drain`."""
        self._device.drain()
        self._in_flight.clear()
        self._outcomes.clear()
        self._moves.cancel()
        self.residents.settle(self._launched)
        self.residents.clear()
        self._draft.clear()
        self._scheduler.forget()
        self.epoch = Epoch(self.epoch.boot_id, self.epoch.run + 1)
        self._applied = self._acknowledged = self._arrival_us = self._steps_left = 0
        self._budget = None
        return self.epoch

    def apply(self, grant: Grant, arrival_us: int = 0) -> None:
        """Apply a Grant, and allow as many further steps as the latest budget says (0: without limit). No step runs
        before the first budget has come. Raises QuireError, with nothing applied, if the Grant is of another epoch, out
        of order, or its budget allows no prefill. An error of one slot goes into a Report."""
        check_follows(grant, self.epoch, self._applied)
        self._applied, self._arrival_us = grant.seq, arrival_us
        self._scheduler.forget()
        self._rules.apply(grant)
        if grant.budget is not None:
            self._budget = grant.budget
        if self._budget is not None:
            self._steps_left = self._budget.step_limit or _UNLIMITED

    def drain(self) -> None:
        """Say in every Report from now on that the worker is about to stop; a first such Report is due at once."""
        self._draining = self._to_announce = True

    def launch(self) -> bool:
        """Form a step and hand it to the device; returns whether a step was launched. Does nothing, and returns False,
        at `depth` steps in flight, before the first budget, or after the budget's last step. Else it first takes in
        ended moves, and runs or ends waiting slots (see `_admit`); if no slot can run then, it returns False. Raises
        DEVICE_BROKEN or DEVICE_HUNG if the device does."""
        if len(self._in_flight) >= self._depth or self._budget is None or self._steps_left == 0:
            return False
        self._moves.collect()
        self._admit()
        began = time.perf_counter_ns()
        residents = self.residents
        schedule = self._scheduler.schedule(self._budget, self._launched)
        if not len(schedule.slot):
            return False
        if self._steps_left != _UNLIMITED:
            self._steps_left -= 1
        batch = self._builder.build(schedule)
        self._launched += 1
        in_flight = InFlightStep(
            step=self._launched,
            applied=self._applied,
            slot=schedule.slot,
            slot_generation=residents.table.slot_generation[schedule.slot],
            count=schedule.count,
            position=batch.position,
            sample=batch.sample,
            decodes=schedule.decodes,
            has_drafts=len(batch.drafts) > 0,
            prepare_us=_us(time.perf_counter_ns() - began),
        )
        residents.note_launch(schedule.slot, batch.position + schedule.count, in_flight.step, schedule.decodes)
        self._in_flight.append(in_flight)
        self._device.launch(batch)
        return True

    def prepare(self) -> bool:
        """Have the device do some of the work that it deferred at its start. To be called while nothing is in flight.
        Returns whether there may be more."""
        return self._device.prepare()

    def collect(self) -> Report | None:
        """Process ended moves and the oldest ended step, and return the next Report; None: there is nothing to report.
        If a step has ended, its Report tells of this step alone, and of ended moves. Else waiting slots run or end (see
        `_admit`), and a Report comes for ended moves, for due errors without a step, once if the worker drains, and,
        while nothing is in flight, for Grants to acknowledge. Each Report acknowledges the Grants that have retired
        (see `_finish_report`). The observer is told of an ended step. Raises the errors of `Device.take_outcomes`."""
        self._moves.collect()
        self._outcomes.extend(self._device.take_outcomes())
        if self._outcomes:
            in_flight, outcome = self._in_flight.popleft(), self._outcomes.popleft()
            report = self._complete_step(in_flight, outcome)
            size = in_flight.size(len(report.token), outcome.count)
        else:
            self._admit()
            quiet = self._acknowledged == self._applied or bool(self._in_flight)
            if quiet and not self._draft.moves and not self._errors_are_due() and not self._to_announce:
                return None
            report, size = Report(epoch=self.epoch, first_step=self.steps + 1), None
        self._finish_report(report)
        if size is not None:
            self._observer.step_done(report.timing[0], size, report.running, report.spare)
        return report

    def check_integrity(self) -> None:
        """Raise Internal where the engine's state contradicts itself."""
        self.residents.check_integrity()
        self._moves.check_integrity()

    def _admit(self) -> None:
        """Run the waiting slots whose cached range is ready, or that may compute what failed moves left short. A slot
        is ended, and a Report gets its error, if its pages are lost otherwise or its grammar cannot go on (see
        ResidentSlots.admit_ready)."""
        for slot, error in self.residents.admit_ready():
            self._draft.add_error(self._applied, slot, error)

    def _retired(self) -> int:
        """The latest Grant that has retired: all steps launched before it was applied have completed."""
        return self._in_flight[0].applied if self._in_flight else self._applied

    def _errors_are_due(self) -> bool:
        """Whether the oldest error without a step belongs to a Grant that has retired."""
        first = self._draft.first_error()
        return first is not None and first <= self._retired()

    def _complete_step(self, in_flight: InFlightStep, outcome: StepOutcome) -> Report:
        """Update the slots with the outcome of an ended step. Returns a Report with the step's rows and timing;
        acknowledgements and counts are still missing."""
        rows = complete_step(self.residents, in_flight, outcome)
        if len(rows.slot) < len(in_flight.slot):
            self._scheduler.forget()  # a held row computes its position again; other missing rows do no harm
        model = outcome.timing
        timing = StepTiming(
            wait=outcome.wait_us,
            prepare=in_flight.prepare_us + model.prepare_us,
            forward=model.forward_us,
            sample=model.sample_us,
            copy=0,
        )
        return rows.report(self.epoch, in_flight.step, in_flight.applied, timing)

    def _finish_report(self, report: Report) -> None:
        """Add the state that every Report has, and ended moves; count the Report's Grants as acknowledged. Errors
        without a step go only into a Report without steps. Until they are reported, no Report retires a Grant later
        than theirs."""
        retired = self._retired()
        if self._errors_are_due():
            retired = min(retired, self._draft.first_error() or 0)
            if not report.steps:
                report.set_errors(self._draft.take_errors(retired))
        self._draft.put_moves(report)
        held = self.residents.table.started()
        running = min(held, self.spec.max_num_seqs)
        report.set_state(
            retired=retired,
            in_flight=len(self._in_flight),
            running=running,
            spare=held - running,
            stalled_slot=self._scheduler.stalled_slots(),
            grant_arrival_us=self._arrival_us,
            draining=self._draining,
        )
        self._acknowledged, self._to_announce = retired, False


def _us(nanoseconds: int) -> int:
    return min(nanoseconds // 1000, 2**32 - 1)
