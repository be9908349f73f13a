"""ReportDraft: what a Report will say, gathered between two of them; and the merge of Reports that follow closely.

Knows the Report's columns and nothing of why they are filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Logprobs, Report, StepTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from quire_common.credit import Epoch
    from quire_common.errors import QuireError
    from quire_worker.engine.moves import MoveResult
    from quire_worker.step import Bool, Int32, LogprobColumns

ROW_COLUMNS = ("slot", "count", "token", "finish", "prefill_slot", "prefill_position")
STEP_COLUMNS = ("step_applied", "step_rows", "step_prefill_tokens")
MOVE_COLUMNS = ("moved_id", "moved_status", "moved_pages", "moved_us")


@dataclass
class ReportDraft:
    """Moves that ended, and errors of slots without a row: those belong to whoever held the slot in the Grant that was
    applied at the time, so a Report says them when exactly that Grant has retired."""

    moves: list[MoveResult] = field(default_factory=list)
    _errors: list[tuple[int, int, QuireError]] = field(default_factory=list)

    def add_error(self, applied: int, slot: int, error: QuireError) -> None:
        """`applied` never falls."""
        self._errors.append((applied, slot, error))

    def first_error(self) -> int | None:
        """The Grant of the oldest error."""
        return self._errors[0][0] if self._errors else None

    def take_errors(self, applied: int) -> list[tuple[int, QuireError]]:
        """The errors of that Grant."""
        mine = [(slot, error) for grant, slot, error in self._errors if grant == applied]
        self._errors = [entry for entry in self._errors if entry[0] != applied]
        return mine

    def clear(self) -> None:
        """Forget everything."""
        self._errors, self.moves = [], []

    def put_moves(self, report: Report) -> None:
        """Move the moves into a Report."""
        if not self.moves:
            return
        report.moved_id = np.array([m.id for m in self.moves], np.int64)
        report.moved_status = np.array([not m.ok for m in self.moves], np.uint8)
        report.moved_pages = np.array([m.pages for m in self.moves], np.int32)
        report.moved_us = np.array([min(m.us, 2**31 - 1) for m in self.moves], np.int32)
        self.moves = []


@dataclass(slots=True)
class StepRows:
    """One step's rows: those that drew a token, then those that ended without one."""

    slot: Int32
    token: Int32
    finish: NDArray[np.uint8]
    prefill_slot: Int32
    prefill_position: Int32
    prefill_tokens: int
    logprobs: Logprobs | None
    errors: list[tuple[int, QuireError]] = field(default_factory=list)

    def report(self, epoch: Epoch, step: int, applied: int, timing: StepTiming) -> Report:
        """As a Report of one step."""
        count = np.zeros(len(self.slot), np.int32)
        count[: len(self.token)] = 1
        return Report(
            epoch=epoch,
            first_step=step,
            step_applied=np.array([applied], np.int64),
            step_rows=np.array([len(self.slot)], np.int32),
            step_prefill_tokens=np.array([self.prefill_tokens], np.int32),
            slot=self.slot,
            count=count,
            token=self.token,
            finish=self.finish,
            logprobs=self.logprobs,
            prefill_slot=self.prefill_slot,
            prefill_position=self.prefill_position,
            error=self.errors,
            timing=[timing],
        )


def keep_logprobs(columns: LogprobColumns | None, kept: Bool) -> Logprobs | None:
    """Logprobs of the sequences whose tokens are kept; their indices count the kept tokens alone."""
    if columns is None:
        return None
    mine = kept[columns.token_index]
    tops = np.repeat(mine, columns.top_count)
    return Logprobs(
        token_index=(np.cumsum(kept, dtype=np.int32) - 1)[columns.token_index][mine].astype(np.int32),
        logprob=columns.logprob[mine],
        rank=columns.rank[mine],
        top_count=columns.top_count[mine],
        top_id=columns.top_id[tops],
        top_logprob=columns.top_logprob[tops],
    )


def can_merge(first: Report, second: Report) -> bool:
    """Reports may travel as one where no Grant lies between them: a slot has one holder in a Report then."""
    return first.epoch == second.epoch and first.retired == second.retired and not first.error and not second.error


def merge_reports(reports: Sequence[Report]) -> Report:
    """Reports in order, each mergeable with the one before, as one. Counts and stalls are the last one's."""
    if len(reports) == 1:
        return reports[0]
    last = reports[-1]
    columns = {
        name: np.concatenate([getattr(r, name) for r in reports]) for name in ROW_COLUMNS + STEP_COLUMNS + MOVE_COLUMNS
    }
    return Report(
        epoch=last.epoch,
        first_step=next((r.first_step for r in reports if r.steps), last.first_step),
        retired=last.retired,
        in_flight=last.in_flight,
        logprobs=_merge_logprobs(reports),
        running=last.running,
        spare=last.spare,
        stalled_slot=last.stalled_slot,
        error=[error for r in reports for error in r.error],
        timing=[timing for r in reports for timing in r.timing],
        grant_arrival_us=last.grant_arrival_us,
        draining=last.draining,
        heartbeat=False,
        **columns,
    )


def _merge_logprobs(reports: Sequence[Report]) -> Logprobs | None:
    parts, first = [], 0
    for report in reports:
        if report.logprobs is not None:
            parts.append((first, report.logprobs))
        first += len(report.token)
    if not parts:
        return None
    return Logprobs(
        token_index=np.concatenate([p.token_index + np.int32(offset) for offset, p in parts]),
        logprob=np.concatenate([p.logprob for _, p in parts]),
        rank=np.concatenate([p.rank for _, p in parts]),
        top_count=np.concatenate([p.top_count for _, p in parts]),
        top_id=np.concatenate([p.top_id for _, p in parts]),
        top_logprob=np.concatenate([p.top_logprob for _, p in parts]),
    )
