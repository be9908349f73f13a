"""ReportDraft gathers the parts of the next Report that belong to no step; StepRows are a step's rows.

Both know the Report's columns, but not why they are filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import LogprobColumns, Report, StepTiming

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.credit import Epoch, PromptLogprobs
    from quire_common.errors import QuireError
    from quire_worker.arrays import Int32
    from quire_worker.engine.transfer_agent import MoveResult


@dataclass
class ReportDraft:
    """Moves that ended, and errors of slots that have no row in a step. Such an error belongs to the sequence that held
    the slot under the Grant applied at that time. So a Report carries it exactly when that Grant has retired."""

    moves: list[MoveResult] = field(default_factory=list)
    _errors: list[tuple[int, int, QuireError]] = field(default_factory=list)

    def add_error(self, applied: int, slot: int, error: QuireError) -> None:
        """Add a slot's error, to be reported when the Grant `applied` has retired. `applied` never falls from one call
        to the next."""
        self._errors.append((applied, slot, error))

    def first_error(self) -> int | None:
        """The number of the Grant to which the oldest error belongs, or None if there is no error."""
        return self._errors[0][0] if self._errors else None

    def take_errors(self, applied: int) -> list[tuple[int, QuireError]]:
        """Remove and return the errors, each with its slot, that belong to the Grant `applied`; errors of other Grants
        stay."""
        mine = [(slot, error) for grant, slot, error in self._errors if grant == applied]
        self._errors = [entry for entry in self._errors if entry[0] != applied]
        return mine

    def clear(self) -> None:
        """Forget everything."""
        self._errors, self.moves = [], []

    def put_moves(self, report: Report) -> None:
        """Write the ended moves into the Report's columns, and forget them."""
        if not self.moves:
            return
        report.set_moves(
            np.array([m.id for m in self.moves], np.int64),
            np.array([not m.ok for m in self.moves], np.uint8),
            np.array([m.pages for m in self.moves], np.int32),
            np.array([min(m.us, 2**31 - 1) for m in self.moves], np.int32),
        )
        self.moves = []


@dataclass(slots=True)
class StepRows:
    """One step's rows: first the rows with sampled tokens, then the rows that ended without a token. Held rows are left
    out."""

    slot: Int32
    count: Int32
    """Number of tokens of each row."""
    token: Int32
    finish: NDArray[np.uint8]
    prefill_slot: Int32
    prefill_position: Int32
    prefill_tokens: int
    logprobs: LogprobColumns | None
    errors: list[tuple[int, QuireError]] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)

    def report(self, epoch: Epoch, step: int, applied: int, timing: StepTiming) -> Report:
        """Return a Report of one step with these rows. `applied` is the Grant that was applied at the step's launch."""
        return Report(
            epoch=epoch,
            first_step=step,
            step_applied=np.array([applied], np.int64),
            step_rows=np.array([len(self.slot)], np.int32),
            step_prefill_tokens=np.array([self.prefill_tokens], np.int32),
            slot=self.slot,
            count=self.count,
            token=self.token,
            finish=self.finish,
            logprobs=self.logprobs,
            prefill_slot=self.prefill_slot,
            prefill_position=self.prefill_position,
            error=self.errors,
            timing=[timing],
            prompt_logprobs=self.scores,
        )
