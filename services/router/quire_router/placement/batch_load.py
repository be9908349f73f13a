"""Cost of company: how full a replica's batch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.replica_table import ReplicaTable, Rows


class BatchLoad:
    """`full_tokens`: what a full batch costs those who join it, since every step takes longer; `beyond_tokens`: the
    same per batch of sequences that have to wait for a row."""

    def __init__(self, table: ReplicaTable, full_tokens: float = 1.0, beyond_tokens: float = 1.0) -> None:
        self._table = table
        self._full = full_tokens
        self._beyond = beyond_tokens

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the cost of each row by how full its batch is."""
        load = self._table.load(rows)
        costs: Costs = self._full * load + self._beyond * np.maximum(load - 1.0, 0.0)
        return costs
