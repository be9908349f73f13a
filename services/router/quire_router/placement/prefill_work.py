"""PrefillWork: the cost of the first token. It is the number of prompt tokens that a replica must compute before this
token, including the tokens of other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.replica_table import ReplicaTable, Rows


class PrefillWork:
    """`cache_weight`: the cost of an uncached token of the request, relative to a token that waits in the queue. It
    should be more than 1, because later requests have to wait for this work too. `load_cost`: the cost of loading a
    token from a kvstore, relative to computing it."""

    def __init__(self, table: ReplicaTable, view: PrefixView, cache_weight: float, load_cost: float) -> None:
        self._table = table
        self._view = view
        self._cache_weight = cache_weight
        self._load_cost = load_cost

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the weighted number of prompt tokens that each row computes before the request's first token: its
        queue, and the request's uncached tokens times `cache_weight`. A token that only a kvstore has counts as
        `load_cost` of a token."""
        device, stored = self._view.cached(request, rows)
        loaded = np.maximum(stored - device, 0)
        own = request.tokens - device - (1.0 - self._load_cost) * loaded
        costs: Costs = self._table.queue(rows) + self._cache_weight * own
        return costs
