"""The rate at which places become free, as a mean over some ten seconds. From this rate, a limit computes when a
refused request should retry. One place is one sequence."""

from __future__ import annotations

import time

_HORIZON_S = 10.0


class ReturnRate:
    """The number of places that were given back lately, and the time in which that happened."""

    def __init__(self) -> None:
        self._places = 0.0
        self._passed_s = 0.0
        self._last_s = time.monotonic()

    def add(self, places: int) -> None:
        """Count places that are given back now. Earlier counts, and the time over which they were counted, lose weight
        in proportion to the time since the last call, and all of it after ten seconds."""
        now_s = time.monotonic()
        passed_s = now_s - self._last_s
        keep = max(0.0, 1.0 - passed_s / _HORIZON_S)
        self._places, self._passed_s = self._places * keep + places, self._passed_s * keep + passed_s
        self._last_s = now_s

    def time_for_s(self, places: float) -> float:
        """Return the seconds until so many places will have been given back at the recent rate; 0.0 if none were given
        back yet."""
        return places * self._passed_s / self._places if self._places else 0.0
