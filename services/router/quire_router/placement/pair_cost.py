"""PairCost: chooses the prefill side and the decode side that together cost a request least. The cost has the work that
waits at both sides, the uncached tokens, and the transfer of pages between the sides, which is faster within a host.

A pair costs as much as its two sides, plus the transfer. The transfer has only two costs for each decode side: from
another host, or from the same host. So not all pairs must be compared. The cheapest pair is either the best pair of the
best decode side, or the best pair within the host whose two best sides cost least. Costs are seconds, if rates are
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router.placement.pickers import LowestCost
from quire_router.placement.pull_work import or_one

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs, Placement
    from quire_router.placement.pull_work import PullWork, Ways
    from quire_router.placement.replica_table import ReplicaTable, Rows


class Pair(NamedTuple):
    """Two rows and their cost. `pull_s` is the part of the cost that is the transfer of pages; None if no rate is
    measured."""

    prefill: int
    decode: int
    cost: float
    pull_s: float | None


class PairCost:
    """`prefill` and `decode` score each side on its own, in prompt tokens. `pulls` estimates the transfer."""

    def __init__(self, table: ReplicaTable, prefill: Placement, decode: Placement, pulls: PullWork) -> None:
        self._table = table
        self._prefill = prefill
        self._decode = decode
        self._pulls = pulls
        # Ties go in turn, and whoever looks for partners does not take the turns of the others.
        self._decodes, self._partners = LowestCost(), LowestCost()

    def choose(self, request: PlacementRequest, able: Rows, behind: Rows) -> Pair | None:
        """Return the cheaper of at most two pairs of a row of `able` that prefills and another row of `behind` that
        decodes: the best pair of the decode side that is cheapest with a pull from another host, and the best pair of
        the decode side that `nearest` returns. If neither side has a compatible partner, return the best pair of the
        cheapest prefill side, or None if that has no partner either. Neither array may be empty. Sides of equal cost
        take turns, so each call changes the state of this object."""
        sides = self._weigh(request, able, behind)
        first, near = self._decodes.pick(np.arange(len(behind)), sides.decode + sides.ways.far), sides.nearest()
        found = [sides.with_decode(first, self._partners)]
        if near is not None and near != first:
            found.append(sides.with_decode(near, self._partners))
        if found == [None] * len(found):  # pages are not alike everywhere
            found.append(sides.with_prefill(int(sides.prefill.argmin())))
        return min((pair for pair in found if pair is not None), key=lambda pair: pair.cost, default=None)

    def _weigh(self, request: PlacementRequest, able: Rows, behind: Rows) -> _Sides:
        """Return the costs of all prefill sides (rows of `able`), of all decode sides (rows of `behind`), and of a pull
        of pages to each decode side. Costs are seconds where rates are measured, otherwise prompt tokens."""
        table, rates = self._table, self._table.rates(behind)
        prefill = self._prefill.costs(request, able) / or_one(table.rates(able))
        company = self._decode.costs(request, behind) / or_one(rates)
        return _Sides(table, able, behind, prefill, company, self._pulls.seconds(request, behind, rates))


@dataclass(frozen=True, slots=True)
class _Sides:
    """The costs of all prefill sides, of all decode sides, and of the transfer to the decode sides. A side is named by
    its position."""

    table: ReplicaTable
    able: Rows
    behind: Rows
    prefill: Costs
    decode: Costs
    ways: Ways

    def with_decode(self, at: int, pick: LowestCost) -> Pair | None:
        """Return the cheapest pair with the decode side at position `at`, or None if no prefill side is compatible.
        `pick` chooses among prefill sides of equal cost."""
        row = int(self.behind[at])
        way = np.where(self.table.are_near(self.able, row), self.ways.near[at], self.ways.far[at])
        costs = np.where(self._fit(self.able, row), self.prefill + way + self.decode[at], np.inf)
        prefill = pick.pick(np.arange(len(costs)), costs)
        return self._pair(prefill, at, costs[prefill], way[prefill])

    def with_prefill(self, at: int) -> Pair | None:
        """Return the cheapest pair with the prefill side at position `at`, or None if no decode side is compatible."""
        row = int(self.able[at])
        way = np.where(self.table.are_near(self.behind, row), self.ways.near, self.ways.far)
        costs = np.where(self._fit(self.behind, row), self.prefill[at] + way + self.decode, np.inf)
        decode = int(costs.argmin())
        return self._pair(at, decode, costs[decode], way[decode])

    def nearest(self) -> int | None:
        """Return the position of the decode side that is best together with a prefill side on its own host; None if no
        known host has both. It does not check that the two are different rows with compatible pages."""
        hosts = self.table.host[self.able], self.table.host[self.behind]
        count = 1 + int(hosts[1].max())
        if count == 1:
            return None
        prefill = np.full(max(count, 1 + int(hosts[0].max())), np.inf)
        np.minimum.at(prefill, hosts[0], self.prefill)
        prefill[0] = np.inf
        costs = prefill[hosts[1]] + self.decode + self.ways.near
        decode = int(costs.argmin())
        return decode if np.isfinite(costs[decode]) else None

    def _pair(self, prefill: int, decode: int, cost: np.float64, pull_s: np.float64) -> Pair | None:
        """Make the pair of two positions; None if its cost is infinite, because the two do not fit. The pair's `pull_s`
        is None if the time of the pull is not measured."""
        if not np.isfinite(cost):
            return None
        known = float(pull_s) if self.ways.measured[decode] else None
        return Pair(int(self.able[prefill]), int(self.behind[decode]), float(cost), known)

    def _fit(self, rows: Rows, row: int) -> NDArray[np.bool_]:
        """Return which of `rows` can make a pair with `row`: other rows with the same model and the same names for
        pages."""
        table = self.table
        alike = (table.digest[rows] == table.digest[row]) & (table.pool[rows] == table.pool[row])
        fit: NDArray[np.bool_] = alike & (rows != row)
        return fit
