"""Engine: applies Grants at step boundaries, runs steps, and says in Reports what happened.

`apply(grant)`, then `step()` until it returns None: the whole interface, with no thread and no gRPC in it. The first
Report after a Grant acknowledges it (`retired`), step or no step. Steps are synchronous: when one is reported, no other
is in flight, so every Grant that was applied is retired.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from quire_common.credit import Epoch, Report, StepTiming
from quire_worker.engine.batch_rule import SlotView, choose_batch, stalled_slots
from quire_worker.engine.grant_rules import GrantRules, check_follows
from quire_worker.engine.move_desk import MoveDesk
from quire_worker.engine.moves import NoMover
from quire_worker.engine.ports import NullObserver
from quire_worker.engine.report_draft import ReportDraft
from quire_worker.engine.residents import Residents
from quire_worker.engine.settle import settle
from quire_worker.engine.slots import SlotState
from quire_worker.engine.step_builder import build_step
from quire_worker.engine.step_runner import run_step

if TYPE_CHECKING:
    from quire_common.credit import Budget, Grant
    from quire_worker.engine.moves import Mover
    from quire_worker.engine.ports import Observer, Runner
    from quire_worker.engine.spec import EngineSpec

_UNLIMITED = -1


class Engine:
    """One replica's muscle. All methods belong to one thread, the model thread; `steps` and `epoch` may be read by
    others."""

    def __init__(
        self, spec: EngineSpec, runner: Runner, mover: Mover | None = None, observer: Observer | None = None
    ) -> None:
        self.spec = spec
        self.steps = 0
        self.epoch = Epoch(secrets.randbits(64), 1)
        self._runner = runner
        self._observer: Observer = NullObserver() if observer is None else observer
        self._draft = ReportDraft()
        self.residents = Residents(spec, self._observer)
        self._moves = MoveDesk(self.residents, NoMover() if mover is None else mover, self._draft, self._observer)
        self._rules = GrantRules(self.residents, self._moves, self._draft)
        self._applied = 0
        self._acknowledged = 0
        self._arrival_us = 0
        self._budget: Budget | None = None
        self._steps_left = 0
        self._last_end = time.perf_counter()

    def begin_run(self) -> Epoch:
        """Another scheduler attaches, or the last has gone: forget all slots, pages and moves; Grants count from 1."""
        self._moves.cancel()
        self.residents.clear()
        self._draft.clear()
        self.epoch = Epoch(self.epoch.boot_id, self.epoch.run + 1)
        self._applied = self._acknowledged = self._arrival_us = self._steps_left = 0
        self._budget = None
        return self.epoch

    def apply(self, grant: Grant, arrival_us: int = 0) -> None:
        """Apply a Grant. Raises the QuireError of one that is refused whole (nothing was applied then); what is wrong
        with one slot is that slot's error, in the next Report. Until a first budget came, nothing runs."""
        check_follows(grant, self.epoch, self._applied)
        self._applied, self._arrival_us = grant.seq, arrival_us
        self._rules.apply(grant)
        if grant.budget is not None:
            self._budget = grant.budget
        if self._budget is not None:
            self._steps_left = self._budget.step_limit or _UNLIMITED

    def step(self) -> Report | None:
        """Run a step if credit and budget allow one, and tell of it, of errors, of moves that ended, and of Grants that
        were not acknowledged yet. None: nothing was done and there is nothing to tell."""
        self._moves.collect()
        self._draft.errors += self.residents.admit_ready()
        report = self._run()
        if report is None:
            if self._draft.is_empty() and self._acknowledged == self._applied:
                return None
            report = Report(epoch=self.epoch, first_step=self.steps + 1)
        self._draft.put_into(report)
        held = self.residents.table.started()
        report.retired = self._acknowledged = self._applied
        report.running = min(held, self.spec.max_num_seqs)
        report.spare = held - report.running
        report.stalled_slot = stalled_slots(self._view())
        report.grant_arrival_us = self._arrival_us
        if report.steps:
            self._observer.step_done(
                report.timing[0], int(report.step_prefill_tokens[0]), len(report.token), report.running, report.spare
            )
        return report

    def check_integrity(self) -> None:
        """Raise Internal where the engine's state contradicts itself."""
        self.residents.check_integrity()
        self._moves.check_integrity()

    def _run(self) -> Report | None:
        """One step, from the batch rule to its rows; None where nobody is able to run."""
        if self._budget is None or self._steps_left == 0:
            return None
        started = time.perf_counter()
        choice = choose_batch(self._view(), self._budget, self.spec.max_num_seqs)
        if not len(choice.slot):
            return None
        if self._steps_left != _UNLIMITED:
            self._steps_left -= 1
        batch = build_step(self.residents.table, choice)
        built = time.perf_counter()
        outcome = run_step(self._runner, batch)
        rows = settle(self.residents, choice, batch.sample, outcome)
        self._draft.errors += rows.errors
        model = outcome.output.timing if outcome.output is not None else None
        timing = StepTiming(
            wait=_us(started - self._last_end),
            prepare=_us(built - started) + (model.prepare_us if model else 0),
            forward=model.forward_us if model else 0,
            sample=model.sample_us if model else 0,
            copy=0,
        )
        self.steps += 1
        self._last_end = time.perf_counter()
        return rows.report(self.epoch, self.steps, self._applied, timing)

    def _view(self) -> SlotView:
        table = self.residents.table
        return SlotView(
            runnable=table.state == SlotState.RUNNING,
            computed=table.computed,
            prefill_len=table.prefill_len,
            ceiling=table.ceiling(),
            order_key=table.order_key,
            prefill_rank=table.prefill_rank,
        )


def _us(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
