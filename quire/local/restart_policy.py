"""When a member that ended is started again: at once after an ordered end, later and later after deaths, at last never.

A pure rule: it starts nothing and reads no clock.
"""

from __future__ import annotations

import random

_MOST_S = 10.0
# A life of this length is a healthy one: what was before it does not count.
_HEALTHY_S = 10.0
# So many processes in a row that ended before they could serve: another one will not do better.
_FAILED_STARTS = 5


class RestartPolicy:
    """Of one member."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._failed_starts = 0

    def delay_s(self, exit_code: int | None, served_s: float | None) -> float | None:
        """Before the next process; None: there is to be none. `served_s`: how long the last one served; None: never."""
        if served_s is None:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                return None
        else:
            self._failed_starts = 0
            if exit_code == 0:
                return 0.0
            if served_s >= _HEALTHY_S:
                self._next_s = self._first_s
        step, self._next_s = self._next_s, min(self._next_s * 2, _MOST_S)
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Somebody believes that it can be started now."""
        self._next_s, self._failed_starts = self._first_s, 0
