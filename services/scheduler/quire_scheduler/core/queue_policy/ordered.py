"""Policies whose order is fixed at arrival: first come first served, and priority."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Callable

_ARRIVALS = 2**40
_MAX_PRIORITY = 2**22
_SWEEP = 64


def arrival_key(request: Request) -> int:
    """Earlier goes first."""
    return request.uid


def priority_key(request: Request) -> int:
    """Lower priority values go first, as in vLLM; then the earlier. Clamped so that the key fits 64 bits."""
    priority = min(max(request.context.priority, -_MAX_PRIORITY), _MAX_PRIORITY)
    return priority * _ARRIVALS + request.uid


class OrderedQueue:
    """A heap by a key."""

    def __init__(self, key: Callable[[Request], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, Request]] = []
        self._length = 0

    def push(self, request: Request) -> None:
        request.take_order_key(self._key(request))
        heapq.heappush(self._heap, (request.order_key, request))
        self._length += 1

    def pop(self) -> Request | None:
        """Remove and return the request with the lowest key that is still QUEUED; None when empty."""
        self._skip_gone()
        if not self._heap:
            return None
        self._length -= 1
        return heapq.heappop(self._heap)[1]

    def next_key(self) -> int | None:
        self._skip_gone()
        return self._heap[0][0] if self._heap else None

    def discard(self, request: Request) -> None:
        """Note that a request inside has left. The heap is swept when most of it is gone, so that aborts cannot grow
        it."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + _SWEEP:
            self._heap = [entry for entry in self._heap if entry[1].state is State.QUEUED]
            heapq.heapify(self._heap)

    def charge(self, tenant: str, tokens: int) -> None:
        """Tenants are alike here."""

    def room(self, tenant: str, max_waiting: int) -> bool:
        """Tenants are alike here."""
        return True

    def __len__(self) -> int:
        return self._length

    def _skip_gone(self) -> None:
        while self._heap and self._heap[0][1].state is not State.QUEUED:
            heapq.heappop(self._heap)
