"""Whether a request is prefilled elsewhere than it is decoded, and by whom: where that brings its second token sooner,
what others have to wait for it included.

Both ways are estimated in seconds from what replicas measured. Where nothing is measured yet, a number of uncached
tokens decides. Knows nothing of requests' lives: see engine/handoff.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router import metrics

if TYPE_CHECKING:
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.registry import Policies
    from quire_router.placement.replica_table import ReplicaTable, Rows
    from quire_router.placement.wish import Wish


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """`least_tokens`: fewer that no cache has are never worth the way. `threshold_tokens`: from so many on it is taken,
    while nothing is measured. `interference`: what a second of prefill costs each sequence that decodes beside it, in
    seconds of the request's own. `load_cost`: as in PrefillWork. `whole_too`: replicas that run whole requests may
    prefill for others. Without `by_rates` the number of tokens decides always."""

    least_tokens: int = 256
    threshold_tokens: int = 2048
    interference: float = 0.3
    load_cost: float = 0.5
    whole_too: bool = False
    by_rates: bool = True


class Sides(NamedTuple):
    """Rows. `prefill` None: the other runs the request as a whole."""

    decode: int
    prefill: int | None = None


class Disaggregation:
    """`view` None: nothing is known of pages, and every token counts as uncached."""

    def __init__(
        self, table: ReplicaTable, policies: Policies, options: SplitOptions, view: PrefixView | None = None
    ) -> None:
        self._table = table
        self._policies = policies
        self._options = options
        self._view = view

    def choose(self, wish: Wish, rows: Rows) -> Sides:
        """One or two of the rows, of which there is at least one."""
        table, options, policies = self._table, self._options, self._policies
        able, behind = table.prefills(rows, whole_too=options.whole_too), table.decodes(rows)
        whole = policies.whole.choose(wish, behind if len(behind) else rows)
        if not len(able) or not len(behind):
            return Sides(whole)
        if self._uncached(wish, whole) < options.least_tokens:
            return _whole(whole, "short")
        decode = policies.decode.choose(wish, behind) if policies.decode is not None else whole
        alike = (table.digest[able] == table.digest[decode]) & (table.pool[able] == table.pool[decode])
        able = able[alike & (able != decode)]
        if not len(able):
            return _whole(whole, "no_pair")
        prefill = policies.prefill.choose(wish, able)
        if not self._pays(wish, whole, prefill, decode):
            return _whole(whole, "whole")
        metrics.pd_decisions.labels("remote").inc()
        return Sides(decode, prefill)

    def _pays(self, wish: Wish, whole: int, prefill: int, decode: int) -> bool:
        table = self._table
        if not (self._options.by_rates and table.rate(prefill) and table.pulls(decode)):
            return self._uncached(wish, whole) >= self._options.threshold_tokens
        pulled = int(table.pulling_tokens[decode]) + wish.tokens - self._device(wish, decode)
        pull_s = pulled * float(table.token_bytes[decode]) / table.pulls(decode)
        return self._prefill_s(wish, whole) > self._prefill_s(wish, prefill, pull_s)

    def _prefill_s(self, wish: Wish, row: int, pull_s: float = 0.0) -> float:
        """Until the prompt is computed there, and what it costs those who decode beside it. Pages travel meanwhile."""
        table = self._table
        own_s = self._uncached(wish, row) / table.rate(row)
        queue_s = float(table.queue(np.array([row]))[0]) / table.rate(row)
        company_s = self._options.interference * float(table.running[row]) * own_s
        return queue_s + max(own_s, pull_s) + company_s

    def _uncached(self, wish: Wish, row: int) -> float:
        """Tokens that it has to compute; what a kvstore has costs a part."""
        if self._view is None:
            return float(wish.tokens)
        device, stored = self._view.cached(wish, np.array([row]))
        loaded = max(int(stored[0] - device[0]), 0)
        return float(wish.tokens - device[0] - (1.0 - self._options.load_cost) * loaded)

    def _device(self, wish: Wish, row: int) -> int:
        return int(self._view.cached(wish, np.array([row]))[0][0]) if self._view is not None else 0


def _whole(row: int, outcome: str) -> Sides:
    metrics.pd_decisions.labels(outcome).inc()
    return Sides(row)
