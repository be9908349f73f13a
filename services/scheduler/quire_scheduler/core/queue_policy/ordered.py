"""OrderedQueue: policies that fix the order at arrival: first come first served, and priority."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.sequence import RequestContext

_ARRIVALS = 2**40
_MAX_PRIORITY = 2**22
_SWEEP = 64


def one_level(context: RequestContext) -> int:
    """Return the same level for all requests: the earliest goes first."""
    return 0


def priority_level(context: RequestContext) -> int:
    """Return the priority as the level; lower values go first, as in vLLM. It is clamped so that the order key fits 64
    bits."""
    return min(max(context.priority, -_MAX_PRIORITY), _MAX_PRIORITY)


class OrderedQueue:
    """A heap of requests: the lowest `level` first, and within a level the earliest arrival."""

    def __init__(self, level: Callable[[RequestContext], int]) -> None:
        self._level = level
        self._heap: list[tuple[int, Request]] = []
        self._length = 0
        # The number of waiting requests, by level.
        self._waiting: dict[int, int] = {}

    def push(self, request: Request) -> None:
        """Add a request. Its order key is made of its level and, within a level, its uid, which grows with arrival."""
        level = self._level(request.context)
        request.take_order_key(level * _ARRIVALS + request.uid)
        heapq.heappush(self._heap, (request.order_key, request))
        self._length += 1
        self._waiting[level] = self._waiting.get(level, 0) + 1

    def pop(self) -> Request | None:
        """Remove and return the request with the lowest key that is still QUEUED; None when empty."""
        self._skip_gone()
        if not self._heap:
            return None
        request = heapq.heappop(self._heap)[1]
        self._count_out(request)
        return request

    def next_key(self) -> int | None:
        self._skip_gone()
        return self._heap[0][0] if self._heap else None

    def discard(self, request: Request) -> None:
        """Note that a waiting request has left, whose state is no longer QUEUED. When most entries of the heap are of
        such requests, they are removed, so that aborts cannot make the heap grow without bound."""
        self._count_out(request)
        if len(self._heap) > 2 * self._length + _SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].state is State.QUEUED]
            heapq.heapify(self._heap)

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Do nothing: this policy treats all tenants alike."""

    def room(self, context: RequestContext, free: int) -> bool:
        """Return True: this policy treats all tenants alike."""
        return True

    def requests_ahead(self, context: RequestContext) -> float:
        """Return how many waiting requests have the same level or a lower one."""
        level = self._level(context)
        return sum(count for other, count in self._waiting.items() if other <= level)

    def __len__(self) -> int:
        return self._length

    def _count_out(self, request: Request) -> None:
        """Lower the queue's length and the count of the request's level by one. The heap is not changed."""
        level = self._level(request.context)
        self._length -= 1
        self._waiting[level] -= 1
        if not self._waiting[level]:
            del self._waiting[level]

    def _skip_gone(self) -> None:
        while self._heap and self._heap[0][1].state is not State.QUEUED:
            heapq.heappop(self._heap)
