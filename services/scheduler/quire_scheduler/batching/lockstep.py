"""Lockstep: the policy of one Grant, one step and one Report at a time. It is the plain version, whose tokens free
running must match exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_scheduler.batching.grant_policy import make_budget, most_rows

if TYPE_CHECKING:
    from quire_common.credit import Budget, Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig


class Lockstep:
    """Sends the next Grant only after the worker has reported the last Grant's step, or has acknowledged that Grant
    with nothing to run."""

    def __init__(self, config: SchedulerConfig, hello: WorkerHello) -> None:
        self.rows = most_rows(config, hello)
        self._budget = make_budget(config, hello, step_limit=1)
        self._lead = hello.max_row_tokens - 1
        self._extra_lead = max(hello.max_constrained_row_tokens - hello.max_row_tokens, 0)
        self._outstanding = 0
        # Whether the worker did something, so that there may be a next step even if nothing new is granted.
        self._progress = False

    def may_grant(self) -> bool:
        """Whether no Grant is outstanding."""
        return not self._outstanding

    def lead(self) -> int:
        """Return how many positions past its known ones a row may compute in one step: one less than the tokens that it
        may sample in a step."""
        return self._lead

    def extra_lead(self) -> int:
        """Return how many positions more than `lead` the next step of a sequence with a grammar needs."""
        return self._extra_lead

    def slack(self) -> int:
        """Return 0: there is no slack."""
        return 0

    def most_started(self, ending: int) -> int:
        """Return the number of rows: there are no standby sequences."""
        return self.rows

    def most_spare_tokens(self) -> int:
        """Return 0: there are no standby sequences."""
        return 0

    def worth_a_step(self) -> bool:
        """Whether the worker reported a step or a finished move since the last Grant. After an acknowledgement with
        nothing to run, only a change can lead to a step."""
        return self._progress

    def budget(self) -> Budget | None:
        """Return the budget with each Grant, since each permits one step."""
        return self._budget

    def granted(self, seq: int) -> None:
        self._outstanding = seq
        self._progress = False

    def reported(self, report: Report) -> None:
        """Allow the next Grant if the Report tells of the last Grant's step, or says that the last Grant was applied
        and nothing runs. Records what `worth_a_step` returns."""
        self._progress |= bool(report.steps or len(report.moved_id))
        stepped = report.steps and int(report.step_applied[-1]) >= self._outstanding
        # The Grant was applied and nothing runs. If its step is about to launch, it does no harm to send the next Grant
        # early.
        idle = report.retired >= self._outstanding and not report.in_flight
        if stepped or idle:
            self._outstanding = 0
