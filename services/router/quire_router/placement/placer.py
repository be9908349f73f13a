"""Places requests: asks the policy, and remembers what was sent where until the replicas tell of it themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router.placement.placed import Placed

if TYPE_CHECKING:
    from quire_router.placement.disaggregation import Disaggregation
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.registry import Policies
    from quire_router.placement.replica_table import ReplicaTable, Rows
    from quire_router.placement.wish import Wish


class PlacedSides(NamedTuple):
    """`prefill` None: the other runs the request as a whole."""

    decode: Placed
    prefill: Placed | None


class Placer:
    """`view` None: nothing is known of pages. `expected_tokens` counts prompt tokens that caches should have. With
    `split`, `place_sides` may name two replicas."""

    def __init__(
        self,
        table: ReplicaTable,
        policies: Policies,
        view: PrefixView | None = None,
        split: Disaggregation | None = None,
    ) -> None:
        self.expected_tokens = 0
        self._table = table
        self._policies = policies
        self._view = view
        self._split = split

    def place(self, wish: Wish, rows: Rows) -> Placed:
        """Choose among rows, of which there is at least one."""
        return self._placed(wish, self._policies.whole.choose(wish, rows))

    def place_sides(self, wish: Wish, rows: Rows) -> PlacedSides:
        """Choose one or two among rows, of which there is at least one."""
        if self._split is None:
            return PlacedSides(self.place(wish, rows), None)
        decode, prefill = self._split.choose(wish, rows)
        if prefill is None:
            return PlacedSides(self._placed(wish, decode), None)
        near = bool(self._table.are_near(np.array([decode]), prefill)[0])
        return PlacedSides(self._pulled(wish, decode, near=near), self._placed(wish, prefill))

    def _placed(self, wish: Wish, row: int) -> Placed:
        cached, held = 0, self._view.held(wish, row) if self._view is not None else None
        # Alone, nothing has to be known of its pages.
        if self._view is not None and self._table.several:
            device, stored = self._view.cached(wish, np.array([row]))
            cached = int(max(device[0], stored[0]))
            self._view.expect(wish, row)
        self.expected_tokens += cached
        return Placed(self._table, row, wish.weight, wish.tokens - cached, held_tokens=held)

    def _pulled(self, wish: Wish, row: int, *, near: bool) -> Placed:
        """What comes from elsewhere is no work ahead of an engine, but ahead of other pages."""
        device = 0
        if self._view is not None:
            device = int(self._view.cached(wish, np.array([row]))[0][0])
            self._view.expect(wish, row)
        return Placed(self._table, row, wish.weight, 0, wish.tokens - device, near=near)
