"""Decides how many threads compute a step, by whether somebody else needs the cores.

Threads that compute one product together wait for the slowest. A neighbour that takes the core of one of them makes
all of them wait, so two workers with a thread for each core are many times slower than two with half as many. This is
a pure rule over what was measured; see `core_meter`.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DELAYED = 0.2
"""Share of the time in which a thread could have run, and had no core."""
_CROWDED_INTERVALS = 2
"""In a row, before there are fewer threads."""
_LEAST_IDLE = 0.5
"""Of each core that another thread would take."""
_LEAST_BUSY = 0.5
"""Cores that this process wants, for an interval to say anything."""
_FIRST_PATIENCE, _MOST_PATIENCE = 3, 300
"""Intervals in a row that must have room before there are more threads."""
_PROVEN = 20
"""Intervals after which more threads were right."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Measurements of one interval."""

    wanted_cores: float
    """Time in which this process's threads were able to run, whether they had a core or not."""
    delayed: float
    """Share of the time in which its threads were able to run that they waited for a core."""
    idle_cores: float
    """Idle cores among those that this process may use."""


class ThreadShare:
    """`threads` is how many are right now: from 1 to `most`, halved and doubled. One thread calls `observe`."""

    def __init__(self, most: int) -> None:
        self.threads = most
        self._most = most
        self._patience = _FIRST_PATIENCE
        self._roomy = self._crowded = 0
        self._since_more = _PROVEN

    def observe(self, interval: Interval) -> None:
        """The interval that has just ended."""
        if interval.wanted_cores < _LEAST_BUSY:
            return
        self._since_more += 1
        more = min(2 * self.threads, self._most) - self.threads
        self._crowded = self._crowded + 1 if self.threads > 1 and interval.delayed > _MOST_DELAYED else 0
        self._roomy = self._roomy + 1 if more and interval.idle_cores >= _LEAST_IDLE * more else 0
        if self._crowded >= _CROWDED_INTERVALS:
            # More threads that were soon too many make the next attempt wait longer.
            soon = self._since_more < _PROVEN
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if soon else _FIRST_PATIENCE
            self.threads //= 2
            self._roomy = self._crowded = 0
        elif self._roomy >= self._patience:
            self.threads += more
            self._roomy = self._since_more = 0
