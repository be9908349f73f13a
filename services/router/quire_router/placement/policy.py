"""The parts of a placement policy: filters remove replicas, scores give costs, and a picker chooses one.

All parts read the columns of a ReplicaTable for the given rows, and do not change the table. A picker may remember
whose turn is next. They run in the event loop and must not block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.replica_table import Rows

    Costs = NDArray[np.float64]


class Filter(Protocol):
    """A part of a policy that removes replicas."""

    def keep(self, request: PlacementRequest, rows: Rows) -> Rows:
        """Return some of the rows, in their order. A filter that keeps none is ignored."""
        ...


class Score(Protocol):
    """A part of a policy that gives replicas costs."""

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the cost of each of the rows, in prompt tokens computed: less is better."""
        ...


class Pick(Protocol):
    """A part of a policy that chooses a replica."""

    def pick(self, rows: Rows, costs: Costs) -> int:
        """Return one of the rows, of which there must be at least one."""
        ...


class Placement:
    """A policy: it applies the filters one after the other, adds the scores, and picks."""

    def __init__(self, pick: Pick, scores: Sequence[Score] = (), filters: Sequence[Filter] = ()) -> None:
        self._pick = pick
        self._scores = scores
        self._filters = filters

    def choose(self, request: PlacementRequest, rows: Rows) -> int:
        """Apply the filters, ignoring a filter that keeps no row, and pick one of the remaining rows by their summed
        scores. A single remaining row is returned without scores. There must be at least one row."""
        for one in self._filters:
            kept = one.keep(request, rows)
            rows = kept if len(kept) else rows
        if len(rows) == 1:
            return int(rows[0])
        return self._pick.pick(rows, self.costs(request, rows))

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the sum of the scores for each of the rows."""
        costs: Costs = np.zeros(len(rows), np.float64)
        for score in self._scores:
            costs += score.costs(request, rows)
        return costs
