"""Decides whether one replica prefills a request and another one decodes it, and chooses both. Disaggregation pays if
the second token comes sooner, counting also the time that other requests wait because of this one.

Both variants are estimated in seconds, from rates that replicas measured. Without measured rates, the number of
uncached tokens decides. This module knows nothing of the lives of requests; see kv_transfer/handoff.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router import metrics
from quire_router.placement.pair_cost import Pair
from quire_router.placement.pull_work import PullWork

if TYPE_CHECKING:
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.policy import Costs
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.registry import Policies
    from quire_router.placement.replica_table import ReplicaTable, Rows


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """The parameters of the decision. `least_tokens`: with fewer uncached tokens, a request is never disaggregated.
    `threshold_tokens`: while nothing is measured, it is disaggregated from this number of uncached tokens on.
    `interference`: how much a second of prefill delays each sequence that decodes on the same replica, as seconds of
    the request's own time. `load_cost`: the cost of loading a token from a kvstore, relative to computing it.
    `whole_too`: replicas that run whole requests may also prefill for others. Without `by_rates`, the number of tokens
    always decides."""

    least_tokens: int = 256
    threshold_tokens: int = 2048
    interference: float = 0.3
    load_cost: float = 0.5
    whole_too: bool = False
    by_rates: bool = True


class Sides(NamedTuple):
    """The two rows of a decision. `prefill` None: the other row runs the whole request."""

    decode: int
    prefill: int | None = None


class Disaggregation:
    """Decides for each request. `view` None: the router knows nothing of pages, so every token counts as uncached."""

    def __init__(
        self, table: ReplicaTable, policies: Policies, options: SplitOptions, view: PrefixView | None = None
    ) -> None:
        self._table = table
        self._policies = policies
        self._options = options
        self._view = view
        self._pulls = PullWork(table, view, 0.0)

    def choose(self, request: PlacementRequest, rows: Rows) -> Sides:
        """Choose the row that decodes the request and, if disaggregation pays, the row that prefills it. First the
        policy for whole requests chooses one of the rows that decode, or one of all rows if none decodes. This row runs
        the whole request in four cases: no row may prefill for others or none decodes, fewer than `least_tokens` tokens
        are uncached at that row, no two rows fit together, or `_split_pays` says no. Otherwise `_pair` has chosen both
        rows, and with a policy for pairs another row may decode. There must be at least one row. Counts the decision in
        the metrics, except in the first case."""
        table, options, policies = self._table, self._options, self._policies
        able, behind = table.prefills(rows, whole_too=options.whole_too), table.decodes(rows)
        whole = policies.whole.choose(request, behind if len(behind) else rows)
        if not len(able) or not len(behind):
            return Sides(whole)
        if self._uncached(request, np.array([whole]))[0] < options.least_tokens:
            return _whole(whole, "short")
        pair = self._pair(request, whole, able, behind)
        if pair is None:
            return _whole(whole, "no_pair")
        if not self._split_pays(request, whole, pair):
            return _whole(whole, "whole")
        metrics.pd_decisions.labels("remote").inc()
        return Sides(pair.decode, pair.prefill)

    def _pair(self, request: PlacementRequest, whole: int, able: Rows, behind: Rows) -> Pair | None:
        """Return the two rows that prefill (one of `able`) and decode (one of `behind`), or None if no two rows fit
        together. Without a policy for pairs, `whole` decodes, and the prefill side is another row with the same model
        and page pool, chosen by the policy for the prefill side; the pair's cost is 0 then."""
        table, policies = self._table, self._policies
        if policies.pairs is not None:
            return policies.pairs.choose(request, able, behind)
        alike = (table.digest[able] == table.digest[whole]) & (table.pool[able] == table.pool[whole])
        able = able[alike & (able != whole)]
        if not len(able):
            return None
        prefill, decodes = policies.prefill.choose(request, able), np.array([whole])
        ways = self._pulls.seconds(request, decodes, table.rates(decodes))
        pull_s = float((ways.near if table.are_near(decodes, prefill)[0] else ways.far)[0])
        return Pair(prefill, whole, 0.0, pull_s if ways.measured[0] else None)

    def _split_pays(self, request: PlacementRequest, whole: int, pair: Pair) -> bool:
        """Whether the second token comes sooner with the pair than with `whole`, counting the queues at `whole` and at
        the prefill side, and the delay of the sequences that run there. Pages travel during the prefill, so the longer
        of both times counts. If rates are not measured, or `by_rates` is off, the uncached tokens at `whole` must reach
        `threshold_tokens` instead."""
        table, sides = self._table, np.array([whole, pair.prefill])
        uncached = self._uncached(request, sides)
        if pair.pull_s is None or not self._options.by_rates:
            return bool(uncached[0] >= self._options.threshold_tokens)
        rates = table.rates(sides)
        own_s = uncached / rates
        others_s = table.queue(sides) / rates + self._options.interference * table.running[sides] * own_s
        return bool(others_s[0] + own_s[0] > others_s[1] + max(own_s[1], pair.pull_s))

    def _uncached(self, request: PlacementRequest, rows: Rows) -> Costs:
        """Return the number of the request's tokens that each row must compute. A token that the row can load from a
        kvstore counts as `load_cost` of a token. Without a view of pages, all tokens count."""
        if self._view is None:
            return np.full(len(rows), float(request.tokens))
        device, stored = self._view.cached(request, rows)
        loaded = np.maximum(stored - device, 0)
        uncached: Costs = request.tokens - device - (1.0 - self._options.load_cost) * loaded
        return uncached


def _whole(row: int, outcome: str) -> Sides:
    """Count the outcome, and return one row for the whole request."""
    metrics.pd_decisions.labels(outcome).inc()
    return Sides(row)
