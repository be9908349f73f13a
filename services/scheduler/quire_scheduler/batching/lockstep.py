"""Lockstep: one Grant, one step, one Report. The plain version that free-running must match token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_scheduler.batching.grant_policy import make_budget, most_rows

if TYPE_CHECKING:
    from quire_common.credit import Budget, Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig


class Lockstep:
    """Sends the next Grant only when the last one's step was reported, or was acknowledged as having nothing to run."""

    def __init__(self, config: SchedulerConfig, hello: WorkerHello) -> None:
        self.rows = most_rows(config, hello)
        self._budget = make_budget(config, hello, step_limit=1)
        self._lead = hello.max_row_tokens - 1
        self._outstanding = 0
        # The worker did something, so there may be a next step even if nothing new is granted.
        self._progress = False

    def may_grant(self) -> bool:
        return not self._outstanding

    def lead(self) -> int:
        """The tokens of the next step alone."""
        return self._lead

    def slack(self) -> int:
        """None."""
        return 0

    def most_started(self, ending: int) -> int:
        """As many as may decode: no spares."""
        return self.rows

    def most_spare_tokens(self) -> int:
        """None."""
        return 0

    def worth_a_step(self) -> bool:
        """Yes after a step or a finished move; after an idle acknowledgement only a change can help."""
        return self._progress

    def budget(self) -> Budget | None:
        """With each Grant: its step."""
        return self._budget

    def granted(self, seq: int) -> None:
        self._outstanding = seq
        self._progress = False

    def reported(self, report: Report) -> None:
        """Allow the next Grant if the Report tells of the last Grant's step, or that the last Grant was applied and
        nothing runs."""
        self._progress |= bool(report.steps or len(report.moved_id))
        stepped = report.steps and int(report.step_applied[-1]) >= self._outstanding
        # Applied, and nothing runs. Should its step be about to launch, then sending the next Grant early is harmless.
        idle = report.retired >= self._outstanding and not report.in_flight
        if stepped or idle:
            self._outstanding = 0
