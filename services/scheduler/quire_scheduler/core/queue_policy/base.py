"""What a queue policy is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.request import Request


class QueuePolicy(Protocol):
    """Holds requests in state QUEUED and hands them out one by one, giving each its `order_key`.

    Called from one thread. A request that leaves by abort or deadline is told of by `discard` and may stay inside
    until it would be handed out: what is no longer QUEUED is skipped.
    """

    def push(self, request: Request) -> None:
        """Take a request in."""

    def pop(self) -> Request | None:
        """Hand out the next one, with its `order_key` set; None when empty."""

    def next_key(self) -> int | None:
        """The order key of the next one, where the policy fixes it at arrival; None where not, or when empty."""

    def discard(self, request: Request) -> None:
        """A request that was pushed and not popped is gone."""

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Output tokens were computed for a request of the tenant; coarse, as pages are granted."""

    def room(self, context: RequestContext, free: int) -> bool:
        """Whether one more request of the tenant may wait, by the policy's own rule, while `free` places are left to
        all."""

    def requests_ahead(self, context: RequestContext) -> float:
        """About how many of those inside would be handed out before a new request of this tenant and priority."""

    def __len__(self) -> int:
        """Requests inside that still wait."""
