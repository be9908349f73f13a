"""Cost of pages that come from elsewhere: prompt tokens that a decode side has to pull, those of others included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_router.placement.policy import Costs
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.replica_table import ReplicaTable, Rows
    from quire_router.placement.wish import Wish


class PullWork:
    """`pull_cost`: what pulling a token costs, against computing it."""

    def __init__(self, table: ReplicaTable, view: PrefixView, pull_cost: float) -> None:
        self._table = table
        self._view = view
        self._pull_cost = pull_cost

    def costs(self, wish: Wish, rows: Rows) -> Costs:
        """See Score."""
        device, _stored = self._view.cached(wish, rows)
        pulled = self._table.pulling_tokens[rows] + wish.tokens - device
        costs: Costs = self._pull_cost * pulled.astype(np.float64)
        return costs
