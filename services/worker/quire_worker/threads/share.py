"""ThreadShare: decides how many threads compute a step, depending on whether other processes need the cores.

Threads that compute one GEMM together wait for the slowest of them. If a neighbour takes the core of one thread, all
threads wait. So two workers with a thread for each core are many times slower than two with half as many. But waiting
for a core proves little by itself: a worker's own scheduler delays its threads too, and two delayed threads may still
be faster than one. So ThreadShare tries another number of threads, and keeps it if steps of the same size become
faster. This is a pure rule over measurements; see `core_meter` and `pace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire_worker.threads.pace import Pace

_MOST_DELAYED: Final = 0.2
"""Share of the time in which a thread could have run, and had no core."""
_CROWDED_INTERVALS: Final = 2
"""In a row, before fewer threads are tried."""
_LEAST_IDLE: Final = 0.25
"""Of each core that another thread would take, before more threads are tried."""
_LEAST_BUSY: Final = 0.5
"""Cores that this process wants, for an interval to say anything."""
_FIRST_PATIENCE, _MOST_PATIENCE = 3, 300
"""Intervals in a row that must have room before more threads are tried."""
_FULL_FACTOR: Final = 8
"""Times as many intervals, up to the most, where no core is idle: steps may be faster all the same."""
_PROVEN: Final = 20
"""Intervals after which more threads were right."""
_TRIAL: Final = 2
"""Intervals of a trial."""
_GAIN: Final = 1.15
"""How many times as long a step must take with half the threads for the other half to be worth its cores."""
_CLEAR_LOSS: Final = 1.3
"""The same after the first interval of a trial of fewer."""
_FIRST_REST, _MOST_REST = 50, 300
"""Intervals from a trial of fewer threads that were slower to the next."""
_SLOWED: Final = 1.5
"""How many times as long a step takes where something has changed, so that the next trial need not wait."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Measurements of one interval."""

    wanted_cores: float
    """Time in which this process's threads were able to run, whether they had a core or not."""
    delayed: float
    """Share of the time in which its threads were able to run that they waited for a core."""
    idle_cores: float
    """Idle cores among those that this process may use."""


@dataclass(slots=True)
class _Trial:
    threads: int
    """That there were before."""
    pace: Pace
    """With these."""
    roomy: bool
    """Whether there were idle cores."""
    intervals: int = 0


class ThreadShare:
    """`threads` is the present number of threads, from 1 to `most`; trials halve or double it. One thread calls
    `observe`."""

    def __init__(self, most: int) -> None:
        self.threads = most
        self._most = most
        self._pace: list[Pace] = []
        self._trial: _Trial | None = None
        self._patience = _FIRST_PATIENCE
        self._roomy = self._crowded = self._since_trial = 0
        self._since_more = _PROVEN
        # The time that steps took when fewer threads proved slower, and until when that result counts.
        self._normal: Pace | None = None
        self._rest = self._left = 0

    def observe(self, interval: Interval, pace: Pace) -> None:
        """Process the interval that has just ended, and its steps: end a trial, begin one, or both. Half the threads
        are tried after two intervals in a row in which threads waited too long for cores, unless such a trial failed a
        short time ago and steps are not much slower than then. Twice as many, up to `most`, are tried after enough
        intervals with idle cores, or long after the last trial. Only this method changes `threads`. Intervals in which
        the process wanted almost no core are ignored."""
        if interval.wanted_cores < _LEAST_BUSY:
            return
        self._since_more += 1
        self._since_trial += 1
        self._left -= 1
        self._pace = [*self._pace[1 - _TRIAL :], pace]
        more = min(2 * self.threads, self._most) - self.threads
        self._crowded = self._crowded + 1 if self.threads > 1 and interval.delayed > _MOST_DELAYED else 0
        self._roomy = self._roomy + 1 if more and interval.idle_cores >= _LEAST_IDLE * more else 0
        if self._trial is not None and not self._judge_trial(self._trial):
            return
        if self._crowded >= _CROWDED_INTERVALS and self._may_be_too_many():
            self._begin_trial(self.threads // 2)
            self._crowded = 0
        elif more and (self._roomy >= self._patience or self._since_trial >= self._full_patience):
            self._begin_trial(self.threads + more)

    def _begin_trial(self, threads: int) -> None:
        """Use this number of threads from now on, and remember the present number with its pace for the comparison."""
        self._trial = _Trial(self.threads, self._recent(), roomy=self._roomy >= self._patience)
        self.threads, self._pace = threads, []
        self._roomy = self._since_trial = 0

    def _judge_trial(self, trial: _Trial) -> bool:
        """Compare the trial's steps with those before it. Returns whether the trial is over, after two intervals, or
        one if steps took over 1.3 times as long with fewer threads. A trial fails if steps took over 1.15 times as long
        with fewer threads, or were less than 1.15 times as fast with more. It is then undone, and the next such trial
        waits longer. If no steps can be compared, fewer threads stay, and more stay if cores were idle. If fewer
        threads stay, more are tried after twice as long a wait if the last increase that stayed was a short time ago,
        else after the shortest."""
        trial.intervals += 1
        times = self._recent().times_of(trial.pace)
        if self.threads < trial.threads:
            slower = times is not None and times > (_GAIN if trial.intervals == _TRIAL else _CLEAR_LOSS)
            if slower:
                self._go_back(trial)
                self._rest = min(2 * self._rest, _MOST_REST) if self._rest else _FIRST_REST
                self._left, self._normal = self._rest, trial.pace
                return True
            if trial.intervals < _TRIAL:
                return False
            # More threads that were soon too many make the next attempt wait longer.
            self._be_patient(soon=self._since_more < _PROVEN)
        else:
            if trial.intervals < _TRIAL:
                return False
            if times * _GAIN > 1.0 if times is not None else not trial.roomy:
                self._go_back(trial)
                self._be_patient(soon=True)
                return True
            self._since_more = 0
        self._trial, self._normal, self._rest = None, None, 0
        return True

    def _go_back(self, trial: _Trial) -> None:
        """End the trial, with the number of threads from before it, and count crowded and roomy intervals anew."""
        self.threads, self._trial, self._pace = trial.threads, None, []
        self._roomy = self._crowded = 0

    def _be_patient(self, *, soon: bool) -> None:
        """Set how long cores must be idle before more threads are tried. The time is twice as long as last time if more
        threads were `soon` too many, else the shortest time."""
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if soon else _FIRST_PATIENCE

    @property
    def _full_patience(self) -> int:
        """Return the number of intervals after a trial until more threads are tried even though no core is idle."""
        return min(_FULL_FACTOR * self._patience, _MOST_PATIENCE)

    def _may_be_too_many(self) -> bool:
        """Whether fewer threads may be tried: the last such trial did not fail, failed long enough ago, or steps are
        now much slower than then."""
        if self._normal is None or self._left <= 0:
            return True
        times = self._recent().times_of(self._normal)
        return times is not None and times > _SLOWED

    def _recent(self) -> Pace:
        """Return the figures of the last intervals with the present number of threads."""
        return sum(self._pace, Pace())
