"""PullWork: estimates how long a decode side pulls pages from another replica, including the pulls of other requests
before it."""

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
    """The seconds of a pull to each row, from a worker of another host and from a worker of its own host. `measured`:
    whether the rate of pulls and the prefill rate are both known, so that they follow from measured rates."""

    far: Costs
    near: Costs
    measured: NDArray[np.bool_]


class PullWork:
    """`view` None: the router knows nothing of pages. `pull_cost`: the cost of pulling a token relative to computing
    it, while nothing is measured."""

    def __init__(self, table: ReplicaTable, view: PrefixView | None, pull_cost: float) -> None:
        self._table = table
        self._view = view
        self._pull_cost = pull_cost

    def seconds(self, request: PlacementRequest, rows: Rows, prefill_rates: Costs) -> Ways:
        """Return, for each row, the time of a pull of the request's missing pages, from another host and from the same
        host, including the pulls of this router's other requests to that row. A row is `measured` if both its pull rate
        and its prefill rate (tokens per second) are known; any other is estimated by `pull_cost`. Each row has its own
        unit: seconds, or prompt tokens where its prefill rate is 0."""
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
        """Return the number of the request's tokens that the device of each row lacks; without a view of pages, all of
        them."""
        if self._view is None:
            return np.full(len(rows), float(request.tokens))
        device, _stored = self._view.cached(request, rows)
        missing: Costs = (request.tokens - device).astype(np.float64)
        return missing


def or_one(rates: Costs) -> Costs:
    """Return the rates, with 1 for rates that are not measured. Costs are then tokens, not seconds."""
    return np.where(rates > 0.0, rates, 1.0)
