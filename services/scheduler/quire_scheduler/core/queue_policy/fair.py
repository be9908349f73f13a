"""Weighted fair queueing between tenants, by tokens; within a tenant by priority, then by arrival.

The algorithm is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
with weights. Each tenant has a counter of the tokens computed for it, divided by its weight; the tenant with the least
counter goes next. One that comes back from idleness is lifted to the least counter among the active, so that absence
earns no credit; what it took shortly before still counts. Tenants are in a heap by their counters, which only grow: an
entry that is too low is put right when it comes to the top. So a step costs O(log n) of n waiting requests.

How many requests of a tenant may wait follows Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory
Packet Switches" (1998): a multiple of the places that are free.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire_scheduler.core.queue_policy.ordered import OrderedQueue, priority_level

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.request import Request

# Idle tenants whose counters are kept; tenants are the clients' to name.
_REMEMBERED = 4096
_SWEEP = 64
# A tenant of weight 1 may have so many requests waiting for each free place. Alone, it fills 8 of 9 places.
_PER_FREE_PLACE = 8


class _Tenant:
    """`served`: tokens divided by the weight. `order` breaks ties. `in_heap`: whether the heap has its entry."""

    __slots__ = ("in_heap", "name", "order", "queue", "served", "weight")

    def __init__(self, name: str, order: int, served: float) -> None:
        self.name = name
        self.order = order
        self.served = served
        self.weight = 1
        self.queue = OrderedQueue(priority_level)
        self.in_heap = False


class FairQueue:
    """One queue per tenant, and a heap of tenants."""

    def __init__(self) -> None:
        # Tenants with requests inside, and others, those that changed longest ago first.
        self._active: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()
        # Entries of tenants that are idle by now are skipped.
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._length = 0
        self._weights = 0
        self._floor = 0.0
        self._tenants = 0
        self._popped = 0

    def push(self, request: Request) -> None:
        """Add the request to its tenant's queue. A tenant that comes back from idleness is lifted to the least counter
        among the active ones. The tenant's weight is that of its latest request."""
        context = request.context
        tenant = self._active.get(context.tenant) or self._activate(context.tenant)
        self._weights += context.weight - tenant.weight
        tenant.weight = context.weight
        tenant.queue.push(request)
        self._length += 1

    def pop(self) -> Request | None:
        """Remove and return the next request of the tenant with the least counter, and charge the tenant for its
        prompt; None when empty."""
        tenant = self._first()
        if tenant is None:
            return None
        request = tenant.queue.pop()
        if request is None:
            return None
        self._length -= 1
        self._floor = tenant.served
        self._popped += 1
        request.take_order_key(self._popped)
        if not len(tenant.queue):
            self._deactivate(tenant)
        # The prompt counts at once: several may be handed out before the first is computed.
        self.charge(request.context, request.prompt_len)
        return request

    def next_key(self) -> int | None:
        """The order key is given at `pop`."""
        return None

    def discard(self, request: Request) -> None:
        """Note that a request inside has left."""
        tenant = self._active[request.context.tenant]
        tenant.queue.discard(request)
        self._length -= 1
        if not len(tenant.queue):
            self._deactivate(tenant)
            if len(self._heap) > 2 * len(self._active) + _SWEEP:
                self._sweep()

    def charge(self, context: RequestContext, tokens: int) -> None:
        """See QueuePolicy; the prompt was charged by `pop`."""
        tenant = self._active.get(context.tenant)
        if tenant is None:
            tenant = self._idle.get(context.tenant) or self._new_tenant(context.tenant)
            self._remember(tenant)
        tenant.served += tokens / context.weight

    def room(self, context: RequestContext, free: int) -> bool:
        """Whether the tenant has fewer requests waiting than its multiple of the `free` places. So each tenant leaves
        places to others, and leaves more of them the more tenants there are."""
        tenant = self._active.get(context.tenant)
        return tenant is None or len(tenant.queue) < _PER_FREE_PLACE * context.weight * free

    def requests_ahead(self, context: RequestContext) -> float:
        """Return about how many requests are handed out until those before it of its own tenant are, and it is its
        turn. Others get their shares meanwhile, as if all requests had the same size."""
        tenant = self._active.get(context.tenant)
        own = tenant.queue.requests_ahead(context) if tenant else 0
        others = self._weights - (tenant.weight if tenant else 0)
        waiting = self._length - (len(tenant.queue) if tenant else 0)
        return own + min(waiting, (own + 1) * others / context.weight)

    def __len__(self) -> int:
        return self._length

    def _first(self) -> _Tenant | None:
        """Return the active tenant with the least counter; its entry, at the top of the heap, is right then."""
        while self._heap:
            served, order, tenant = self._heap[0]
            if self._active.get(tenant.name) is not tenant:
                heapq.heappop(self._heap)
                tenant.in_heap = False
            elif served < tenant.served:
                heapq.heapreplace(self._heap, (tenant.served, order, tenant))
            else:
                return tenant
        return None

    def _activate(self, name: str) -> _Tenant:
        """Move the tenant from the idle ones, or make it, and lift its counter."""
        first = self._first()
        tenant = self._idle.pop(name, None) or self._new_tenant(name)
        tenant.served = max(tenant.served, first.served if first else self._floor)
        self._active[name] = tenant
        self._weights += tenant.weight
        if not tenant.in_heap:
            tenant.in_heap = True
            heapq.heappush(self._heap, (tenant.served, tenant.order, tenant))
        return tenant

    def _new_tenant(self, name: str) -> _Tenant:
        self._tenants += 1
        return _Tenant(name, self._tenants, self._floor)

    def _deactivate(self, tenant: _Tenant) -> None:
        """Keep the counter alone of a tenant that has no request inside."""
        del self._active[tenant.name]
        self._weights -= tenant.weight
        # Emptied by discards, it may still have entries of requests that have left.
        tenant.queue = OrderedQueue(priority_level)
        self._remember(tenant)

    def _remember(self, tenant: _Tenant) -> None:
        """Note that an idle tenant has changed. Where too many are remembered, the one that changed longest ago is
        dropped."""
        self._idle[tenant.name] = tenant
        self._idle.move_to_end(tenant.name)
        if len(self._idle) > _REMEMBERED:
            self._idle.popitem(last=False)

    def _sweep(self) -> None:
        """Drop entries of idle tenants, so that aborts cannot grow the heap."""
        for _, _, tenant in self._heap:
            tenant.in_heap = False
        self._heap = [(tenant.served, tenant.order, tenant) for tenant in self._active.values()]
        for tenant in self._active.values():
            tenant.in_heap = True
        heapq.heapify(self._heap)
