"""PullWork: how long pages take that come from elsewhere, behind those of others that a decode side still pulls."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router.placement.replica_table import NEAR_TIMES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.replica_table import ReplicaTable, Rows


class Ways(NamedTuple):
    """Seconds for each row, from a worker of another host and from one of its own; `measured`: where they are more than
    a guess."""

    far: Costs
    near: Costs
    measured: NDArray[np.bool_]


class PullWork:
    """`view` None: nothing is known of pages. `pull_cost`: what pulling a token counts against computing it, where
    nothing is measured yet."""

    def __init__(self, table: ReplicaTable, view: PrefixView | None, pull_cost: float) -> None:
        self._table = table
        self._view = view
        self._pull_cost = pull_cost

    def seconds(self, request: PlacementRequest, rows: Rows, prefill_rates: Costs) -> Ways:
        """Return, for each row, how long a pull of the request's missing pages takes, with the pulls that are ahead of
        it. The unit is seconds, but prompt tokens where `prefill_rates` (tokens per second) is 0."""
        table = self._table
        far_rate, near_rate = table.pull_rates(rows)
        measured = (far_rate > 0.0) & (prefill_rates > 0.0)
        if measured.all():
            token_bytes = table.token_bytes[rows]
            far, near = token_bytes / far_rate, token_bytes / near_rate
        else:
            far = self._pull_cost / or_one(prefill_rates)
            near = far / NEAR_TIMES
            token_bytes = table.token_bytes[rows[measured]]
            far[measured], near[measured] = token_bytes / far_rate[measured], token_bytes / near_rate[measured]
        queue = table.pulling_tokens[rows] * far + table.pulling_near_tokens[rows] * near
        own = self._tokens(request, rows)
        return Ways(queue + own * far, queue + own * near, measured)

    def _tokens(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return how many of the request's tokens the device of each row lacks."""
        if self._view is None:
            return np.full(len(rows), float(request.tokens))
        device, _stored = self._view.cached(request, rows)
        missing: Costs = (request.tokens - device).astype(np.float64)
        return missing


def or_one(rates: Costs) -> Costs:
    """Return the rates, with 1 for those that are not measured: costs are compared in tokens then, not seconds."""
    return np.where(rates > 0.0, rates, 1.0)
