"""The transfer of one sequence's KV pages between engines. Migration and the routes of kv_transfer/ write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.sequences.kv_route import KvOffer, KvRoute


class KvProgress:
    """The KV route and the KV offer of one sequence. `route` None: no pages are transferred. `offer` says how the
    client can pull pages that are kept for it."""

    __slots__ = ("offer", "route")

    def __init__(self) -> None:
        self.route: KvRoute | None = None
        self.offer: KvOffer | None = None

    def begin_route(self, route: KvRoute) -> None:
        """Set the route by which the sequence's pages are transferred."""
        self.route = route

    def offer_pages(self, offer: KvOffer) -> None:
        """Set the offer of the pages that an engine keeps for the client."""
        self.offer = offer

    def withdraw_offer(self) -> None:
        """Remove the offer, because no engine keeps the pages any more."""
        self.offer = None

    def close(self) -> None:
        """Close the route, because the sequence has ended or was aborted. Idempotent."""
        if self.route is not None:
            self.route.close()
