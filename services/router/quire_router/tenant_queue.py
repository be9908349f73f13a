"""Queues in which tenants take turns: between two items of one tenant, each other tenant gets at most one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Items of tenants. Each tenant's items stay in their order. Not safe for threads."""

    def __init__(self) -> None:
        # In the order of the tenants' next turns; no deque is empty.
        self._items: dict[str, deque[T]] = {}

    def push(self, tenant: str, item: T) -> None:
        """Append an item."""
        self._items.setdefault(tenant, deque()).append(item)

    def pop(self) -> T | None:
        """Remove and return the oldest item of the tenant whose turn is next, and move this tenant behind all others.
        None if the queue is empty."""
        if not self._items:
            return None
        tenant, items = next(iter(self._items.items()))
        del self._items[tenant]
        item = items.popleft()
        if items:
            self._items[tenant] = items
        return item

    def remove(self, tenant: str, item: T) -> None:
        """Remove an item, unless it was popped before."""
        items = self._items.get(tenant, deque())
        if item in items:
            items.remove(item)
            if not items:
                del self._items[tenant]


class TenantTurns:
    """Lets one task of an event loop at a time into a `with` block, in the order of a TenantQueue."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: TenantQueue[asyncio.Future[None]] = TenantQueue()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and hold it while the `with` block lasts; then the next waiting task gets it.
        Without other tasks, there is no wait."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        """Queue for the tenant's turn, and return when it comes. A task that is cancelled leaves the queue, and passes
        on a turn that came at the same time."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(tenant, turn)
            if turn.done() and not turn.cancelled():  # the turn came at the same time
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next task that waits and is not cancelled; without one, the turn is free."""
        following = self._waiting.pop()
        while following is not None and following.done():  # its task was cancelled
            following = self._waiting.pop()
        if following is None:
            self._taken = False
        else:
            following.set_result(None)
