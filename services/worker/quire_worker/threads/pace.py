"""Pace: the times of steps, which are compared only among steps of one size. It knows nothing of threads."""

from __future__ import annotations

from typing import Final

_TILE: Final = 16
"""Rows that CPU products compute at once; steps of equally many tiles take about the same time."""
_LEAST_STEPS: Final = 2


class Pace:
    """Steps and their seconds, by tiles of rows."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: dict[int, tuple[int, float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Count a step that ended, with its rows and its time."""
        tiles = -(-rows // _TILE)
        steps, before_s = self._steps.get(tiles, (0, 0.0))
        self._steps[tiles] = steps + 1, before_s + seconds

    def __add__(self, other: Pace) -> Pace:
        both = Pace()
        both._steps = dict(self._steps)
        for tiles, (steps, seconds) in other._steps.items():
            before, before_s = both._steps.get(tiles, (0, 0.0))
            both._steps[tiles] = before + steps, before_s + seconds
        return both

    def times_of(self, other: Pace) -> float | None:
        """Return the factor by which steps took longer here than steps of the same sizes in `other`; None if fewer than
        two steps can be compared. Of each size, as many steps count as both have."""
        here_s = there_s = 0.0
        common = 0
        for tiles, (steps, seconds) in self._steps.items():
            other_steps, other_s = other._steps.get(tiles, (0, 0.0))
            least = min(steps, other_steps)
            if least:
                common += least
                here_s += least * seconds / steps
                there_s += least * other_s / other_steps
        return here_s / there_s if common >= _LEAST_STEPS and there_s else None
