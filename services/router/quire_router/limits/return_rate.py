"""The rate at which places become free, as a mean over some ten seconds. Tells when a refused request may find room."""

from __future__ import annotations

import time

_HORIZON_S = 10.0


class ReturnRate:
    """Places that were given back lately, and in what time."""

    def __init__(self) -> None:
        self._places = 0.0
        self._passed_s = 0.0
        self._last_s = time.monotonic()

    def add(self, places: int) -> None:
        """Count places that are given back now."""
        now_s = time.monotonic()
        passed_s = now_s - self._last_s
        keep = max(0.0, 1.0 - passed_s / _HORIZON_S)
        self._places, self._passed_s = self._places * keep + places, self._passed_s * keep + passed_s
        self._last_s = now_s

    def time_for_s(self, places: float) -> float:
        """Return how long it takes until so many places are given back; 0.0 where none were yet."""
        return places * self._passed_s / self._places if self._places else 0.0
