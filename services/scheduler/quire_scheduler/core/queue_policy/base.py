"""QueuePolicy: the interface of a queue policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.request import Request


class QueuePolicy(Protocol):
    """Holds requests in state QUEUED, hands them out one by one, and gives each its `order_key`.

    All methods are called from one thread. When a request leaves by abort or deadline, `discard` is called. The policy
    may keep its entry until the request would be handed out, and then skips it, since the request is no longer QUEUED.
    """

    def push(self, request: Request) -> None:
        """Add a request."""

    def pop(self) -> Request | None:
        """Remove and return the next request, with its `order_key` set; None when empty."""

    def next_key(self) -> int | None:
        """Return the order key of the next request; None when empty, or if the policy does not fix keys at arrival."""

    def discard(self, request: Request) -> None:
        """Note that a request has left that was pushed and not popped."""

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Charge the tenant for the positions of pages that a request gets while it runs, in advance of the tokens.
        Pages that a request gets at its start are not charged; `pop` may charge the prompt."""

    def room(self, context: RequestContext, free: int) -> bool:
        """Whether the policy lets one more request of the tenant wait, while `free` places are left for all tenants."""

    def requests_ahead(self, context: RequestContext) -> float:
        """Return about how many waiting requests would be handed out before a new one of this tenant and priority."""

    def __len__(self) -> int:
        """Return the number of requests inside that still wait."""
