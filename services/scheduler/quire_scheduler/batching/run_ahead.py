"""RunAhead: measures how many steps the worker runs between the state from which a Grant was made and the first step
that applies the Grant.

The distance is measured only in steps, so that no clocks need to agree and the worker's speed cancels out. This module
knows nothing of slots.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire_common.credit import Report

MARGIN = 4
MOST_STEPS = 512
# The number of measurements in a window. The largest one of the present window and of the last full one counts.
_WINDOW = 32


class RecentMaximum:
    """The largest measurement of the present window and of the one before it; 0 before the first measurement."""

    def __init__(self) -> None:
        self._measured = self._largest = self._largest_before = 0

    @property
    def value(self) -> int:
        """The largest recent measurement."""
        return max(self._largest, self._largest_before)

    def add(self, measured: int) -> None:
        """Add a measurement. After each 32 measurements a new window begins; the maximum of the last full window is
        kept, and that of the one before is dropped."""
        if self._measured == _WINDOW:
            self._largest_before, self._largest, self._measured = self._largest, 0, 0
        self._largest = max(self._largest, measured)
        self._measured += 1


class _Sent(NamedTuple):
    seq: int
    # The last step that had been reported when the Grant was sent, and the number of Reports of stalled slots until
    # then.
    completed: int
    stalls: int


class RunAhead:
    """The largest recent distance plus a margin. Before the first measurement, `at_first` counts as the distance."""

    def __init__(self, at_first: int) -> None:
        self._at_first = at_first
        self._sent: deque[_Sent] = deque()
        self._completed = 0
        self._stalls = 0
        self._distance = RecentMaximum()

    @property
    def steps(self) -> int:
        """The number of steps that credit must cover, so that it does not run out before more credit arrives."""
        return min((self._distance.value or self._at_first) + MARGIN, MOST_STEPS)

    def sent(self, seq: int) -> None:
        """Note that Grant `seq` was sent."""
        self._sent.append(_Sent(seq, self._completed, self._stalls))

    def reported(self, report: Report) -> None:
        """Measure the distance of each Grant that the reported steps are the first to apply: from the last step that
        had been reported when the Grant was sent, to the first step that applied it. The distance is doubled if
        slots were stalled meanwhile."""
        self._stalls += bool(len(report.stalled_slot))
        applied = report.step_applied
        if not len(applied):
            return
        newest = int(applied[-1])
        while self._sent and self._sent[0].seq <= newest:
            sent = self._sent.popleft()
            first = report.first_step + int(applied.searchsorted(sent.seq))
            distance = first - sent.completed
            # The worker stood still meanwhile; otherwise it would have run further.
            self._distance.add(2 * distance if self._stalls > sent.stalls else distance)
        self._completed = report.first_step + len(applied) - 1
