"""Placer: places requests by the policy, and counts the load of each request at its replica until the replica reports
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_router.placement.load_reservation import LoadReservation

if TYPE_CHECKING:
    from quire_router.placement.disaggregation import Disaggregation
    from quire_router.placement.placement_request import PlacementRequest
    from quire_router.placement.prefix_view import PrefixView
    from quire_router.placement.registry import Policies
    from quire_router.placement.replica_table import ReplicaTable, Rows


class ReservedSides(NamedTuple):
    """The reservations of a request. `prefill` None: the other replica runs the whole request."""

    decode: LoadReservation
    prefill: LoadReservation | None


class Placer:
    """`view` None: the router knows nothing of pages. `expected_tokens` counts the prompt tokens that caches should
    have. With `split`, `place_sides` may choose two replicas."""

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

    def place(self, request: PlacementRequest, rows: Rows) -> LoadReservation:
        """Choose one of `rows` for the whole request by the policy. Reserve the request's load there and, with several
        replicas and a view of pages, record in the page directory that its pages are expected there (see `_reserve`).
        There must be at least one row."""
        return self._reserve(request, self._policies.whole.choose(request, rows))

    def place_sides(self, request: PlacementRequest, rows: Rows) -> ReservedSides:
        """Choose one of `rows` for the whole request or, if disaggregation pays, two of them, one to decode and one to
        prefill. Reserve load at each and, with several replicas and a view of pages, record in the page directory that
        the pages are expected there. There must be at least one row."""
        if self._split is None:
            return ReservedSides(self.place(request, rows), None)
        decode, prefill = self._split.choose(request, rows)
        if prefill is None:
            return ReservedSides(self._reserve(request, decode), None)
        near = bool(self._table.are_near(np.array([decode]), prefill)[0])
        return ReservedSides(self._reserve_pull(request, decode, near=near), self._reserve(request, prefill))

    def _reserve(self, request: PlacementRequest, row: int) -> LoadReservation:
        """Reserve the load of the request's uncached prompt at a row, and record in the page directory that its pages
        are expected there. Adds the tokens that caches should have to `expected_tokens`. With a single replica or
        without a view of pages, all tokens count as uncached, and nothing is recorded in the directory. The reservation
        keeps the result of `PrefixView.held`, also with a single replica."""
        cached, held = 0, self._view.held(request, row) if self._view is not None else None
        # Alone, nothing has to be known of its pages.
        if self._view is not None and self._table.several:
            device, stored = self._view.cached(request, np.array([row]))
            cached = int(max(device[0], stored[0]))
            self._view.expect(request, row)
        self.expected_tokens += cached
        return LoadReservation(self._table, row, request.weight, request.tokens - cached, held_tokens=held)

    def _reserve_pull(self, request: PlacementRequest, row: int, *, near: bool) -> LoadReservation:
        """Reserve the load of a request at the row that decodes the request. The tokens that the row's device lacks
        count as pulled once `start_pull` is called, and never as computed: they delay other pulls, not the engine. With
        a view of pages, record in the page directory that the pages are expected there. `near`: the other side is on
        the same host."""
        device = 0
        if self._view is not None:
            device = int(self._view.cached(request, np.array([row]))[0][0])
            self._view.expect(request, row)
        return LoadReservation(self._table, row, request.weight, 0, request.tokens - device, near=near)
