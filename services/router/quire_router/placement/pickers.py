"""Pickers: the last part of a policy. A picker chooses one replica by its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_router.placement.policy import Costs
    from quire_router.placement.replica_table import Rows


class RoundRobin:
    """Picks every replica in turn, whatever it costs."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, rows: Rows, costs: Costs) -> int:
        """Return the first row with a greater number than the one picked last, or else the first row. `rows` are in
        ascending order; costs are ignored."""
        self._last = int(rows[np.searchsorted(rows, self._last, side="right") % len(rows)])
        return self._last


class LowestCost:
    """Picks the replica that costs least. Replicas of equal cost take turns."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def pick(self, rows: Rows, costs: Costs) -> int:
        """Return the row that costs least; rows of equal cost take turns."""
        best = rows[costs == costs.min()]
        return self._turn.pick(best, costs)
