"""One sequence's KV pages on their way between engines. The route's owner alone writes it; see kv_transfer/."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_router.sequences.kv_route import KvOffer, KvRoute


class KvProgress:
    """`route` None: no pages travel. `offer`: how a client can have pages that are kept for it."""

    __slots__ = ("offer", "route")

    def __init__(self) -> None:
        self.route: KvRoute | None = None
        self.offer: KvOffer | None = None

    def begin_route(self, route: KvRoute) -> None:
        """Set the route by which the sequence's pages are transferred."""
        self.route = route

    def offer_pages(self, offer: KvOffer) -> None:
        """Keep how the client can have the pages that an engine keeps for it."""
        self.offer = offer

    def withdraw_offer(self) -> None:
        """Forget the offer: no engine keeps pages any more."""
        self.offer = None

    def close(self) -> None:
        """Close the route: the sequence has ended, or nobody wants it any more. Idempotent."""
        if self.route is not None:
            self.route.close()
