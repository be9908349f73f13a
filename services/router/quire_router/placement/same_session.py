"""SameSession: one replica per session, by rendezvous hashing. If a replica comes or goes, only its own sessions
move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.replica_table import ReplicaTable, Rows

# A replica with so much more than the mean load is left out: one popular session must not drown its replica.
_MOST_LOAD = 1.25
_SPARE_LOAD = 0.25


class WithoutCrowds:
    """A filter that removes replicas with much more load than the others."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table

    def keep(self, request: PlacementRequest, rows: Rows) -> Rows:
        """Return the rows whose load is at most 1.25 times the mean, plus a quarter of a batch."""
        load = self._table.load(rows)
        kept: Rows = rows[load <= _MOST_LOAD * load.mean() + _SPARE_LOAD]
        return kept


class SameSession:
    """A score by which each session puts the replicas in an order of its own, the same in all routers. The first
    replica of this order costs least. Without a session, the load of the batch decides."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table

    def costs(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return a cost from the hash of the session and the row's name (rendezvous hashing). So all routers agree on
        the cheapest replica of a session. Without a session, the cost is the row's load."""
        if not request.session:
            return self._table.load(rows)
        seed = xxhash.xxh3_64_intdigest(request.session.encode())
        # Rows are this router's own, so all routers must go by what a replica is called.
        mixed = (self._table.name_hash[rows] ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        costs: Costs = (mixed >> np.uint64(11)).astype(np.float64)
        return costs
