"""Credit: the policy of free running. The worker runs by itself on credit (positions that it may compute) that Grants
extend ahead of need. Some sequences are started ahead of need in standby slots, and the worker admits these by itself
when others end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from quire_scheduler.batching.grant_policy import make_budget, most_rows
from quire_scheduler.batching.run_ahead import RecentMaximum, RunAhead

if TYPE_CHECKING:
    from quire_common.credit import Budget, Report, WorkerHello
    from quire_scheduler.config import SchedulerConfig

_AHEAD = 1.5
# The number of standby sequences as a share of the rows, before any sequence has finished.
_LEAST_AHEAD = 1 / 16
_SPARE_STEPS = 4
_LEAST_IN_FLIGHT = 8
# The number of steps over which the rate of finishes is a mean.
_RATE_STEPS = 256


class Credit:
    """Implements GrantPolicy. It measures time in steps and reads no clock. A measured number of steps is turned into
    positions by the number of tokens that a row samples in a step."""

    def __init__(self, config: SchedulerConfig, hello: WorkerHello) -> None:
        self.rows = most_rows(config, hello)
        self._least_ahead = math.ceil(self.rows * _LEAST_AHEAD)
        # If the configuration lets fewer sequences decode than the worker can, a standby sequence would not wait but
        # run, so there are no standby sequences.
        self._most_started = hello.num_slots if self.rows == hello.max_num_seqs else self.rows
        self._page_size = hello.model.pages.page_size
        self._budget = make_budget(config, hello, step_limit=0)
        self._budget_sent = False
        self._lead = RunAhead(at_first=self._page_size)
        self._most_row_tokens = hello.max_row_tokens
        self._most_constrained_row_tokens = hello.max_constrained_row_tokens
        # Whether a row may sample several tokens in a step.
        self._samples_several = max(hello.max_row_tokens, hello.max_constrained_row_tokens) > 1
        self._row_tokens = RecentMaximum()
        self._sent = 0
        self._retired = 0
        self._finishes = 0.0
        self._steps = 0.0

    def may_grant(self) -> bool:
        """Whether fewer Grants are in flight than the lead has steps (or than 8, if that is more), so that a worker
        that hangs is not flooded."""
        in_flight = self._sent - self._retired
        return in_flight < _LEAST_IN_FLIGHT or in_flight < self._lead.steps

    def lead(self) -> int:
        """Return the measured number of steps, times the most tokens that a row recently sampled in a step, plus one
        less than the tokens that a row may sample in one step; at least one page. A row that may sample several tokens
        has credit for all of them while it has its whole lead; with less it tries fewer."""
        return self._lead_of(self._most_row_tokens)

    def extra_lead(self) -> int:
        """Return by how many positions the lead of sequences with grammars, whose rows may sample more tokens, exceeds
        `lead`."""
        return max(self._lead_of(self._most_constrained_row_tokens) - self.lead(), 0)

    def slack(self) -> int:
        """Return the most tokens that a row samples in as many steps as a page has positions. All slots together then
        need about one Grant in that time."""
        return self._page_size * self._sampled_tokens(self._most_row_tokens)

    def most_started(self, ending: int) -> int:
        """Return the number of rows plus that of standby sequences, which are started ahead of need. Standby sequences
        are 1.5 times as many as sequences end within the lead, and at least `ending` and 1/16 of the rows. The sum is
        at most the worker's slots. If the configuration lets fewer sequences decode than the worker can, there are no
        standby sequences."""
        expected = _AHEAD * self.finish_rate * self._lead.steps
        ahead = max(math.ceil(expected), ending, self._least_ahead)
        return min(self.rows + ahead, self._most_started)

    def most_spare_tokens(self) -> int:
        """Return the tokens of four full steps."""
        return _SPARE_STEPS * self._budget.tokens_per_step

    def worth_a_step(self) -> bool:
        """Return False: the worker's steps need no Grant."""
        return False

    def budget(self) -> Budget | None:
        """Return the budget for the first Grant, then None."""
        return None if self._budget_sent else self._budget

    def granted(self, seq: int) -> None:
        """Note that Grant `seq` was made with the budget, and begin to measure its lead."""
        self._sent = seq
        self._budget_sent = True
        self._lead.sent(seq)

    def reported(self, report: Report) -> None:
        """Record which Grants the Report retires, measure the lead and, if rows may sample several tokens, the most
        tokens of a row. Update the decaying counts of steps and of sequences that ended."""
        self._retired = max(self._retired, report.retired)
        self._lead.reported(report)
        if self._samples_several and len(report.count):
            self._row_tokens.add(int(report.count.max()))
        if steps := report.steps:
            keep = max(0.0, 1.0 - steps / _RATE_STEPS)
            self._finishes = self._finishes * keep + np.count_nonzero(report.finish)
            self._steps = self._steps * keep + steps

    def _lead_of(self, row_tokens: int) -> int:
        """Return the lead, in positions, of rows that may sample `row_tokens` tokens in a step."""
        return max(self._lead.steps * self._sampled_tokens(row_tokens) + row_tokens - 1, self._page_size)

    def _sampled_tokens(self, row_tokens: int) -> int:
        """Return the most tokens that any row recently sampled in a step, at most `row_tokens`."""
        return min(self._row_tokens.value or row_tokens, row_tokens)

    @property
    def finish_rate(self) -> float:
        """The number of sequences that end per step."""
        return self._finishes / self._steps if self._steps else 0.0
