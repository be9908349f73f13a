"""Places requests: asks the policy, and remembers what was sent where until the replicas tell of it themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_router.placement.replica_table import Placed

if TYPE_CHECKING:
    from quire_router.placement.policy import Placement
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.replica_table import ReplicaTable, Rows
    from quire_router.placement.wish import Wish


class Placer:
    """`view` None: nothing is known of pages. `expected_tokens` counts prompt tokens that caches should have."""

    def __init__(self, table: ReplicaTable, policy: Placement, view: PrefixView | None = None) -> None:
        self.expected_tokens = 0
        self._table = table
        self._policy = policy
        self._view = view

    def place(self, wish: Wish, rows: Rows) -> Placed:
        """Choose among rows, of which there is at least one."""
        row, cached = self._policy.choose(wish, rows), 0
        # Alone, nothing has to be known of its pages.
        if self._view is not None and self._table.several:
            device, stored = self._view.cached(wish, np.array([row]))
            cached = int(max(device[0], stored[0]))
            self._view.expect(wish, row)
        self.expected_tokens += cached
        return Placed(self._table, row, wish.weight, wish.tokens - cached)
