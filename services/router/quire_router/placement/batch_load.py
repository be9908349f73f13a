"""BatchLoad: the cost of a replica's batch, by how full it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.replica_table import ReplicaTable, Rows


class BatchLoad:
    """`full_tokens`: the cost of joining a full batch, in prompt tokens, because a larger batch makes every step
    longer. `beyond_tokens`: the cost of each further batch of sequences that wait for a row."""

    def __init__(self, table: ReplicaTable, full_tokens: float = 1.0, beyond_tokens: float = 1.0) -> None:
        self._table = table
        self._full = full_tokens
        self._beyond = beyond_tokens

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the cost of each row by its load: the sequences there as a fraction of its batch. The cost grows by
        `full_tokens` per batch, and beyond one full batch by `beyond_tokens` more."""
        load = self._table.load(rows)
        costs: Costs = self._full * load + self._beyond * np.maximum(load - 1.0, 0.0)
        return costs
