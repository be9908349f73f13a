"""FairQueue: weighted fair queueing between tenants, by tokens. Within a tenant, requests are ordered by priority, then
by arrival.

The algorithm is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
with weights. Each tenant has a counter of tokens, divided by its weight. It counts the whole prompt of each request
that is handed out, cached tokens included, and the positions of all pages that requests get while they run. The tenant
with the lowest counter is next. When an idle tenant comes back, its counter is raised to the lowest counter of the
active tenants or, without any, to the present one of the tenant served last. So a tenant earns no credit by its
absence; a higher counter stays. Tenants are in a heap by their counters, which only grow: an entry that is too low is
corrected when it comes to the top. So each operation costs O(log n) for n waiting requests.

The number of requests that a tenant may have waiting follows Choudhury and Hahne, "Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches" (1998): it is a multiple of the number of free places.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire_scheduler.core.queue_policy.ordered import OrderedQueue, priority_level

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.request import Request

# The most idle tenants whose counters are kept. The number of tenants has no other bound, since clients choose their
# names.
_REMEMBERED = 4096
_SWEEP = 64
# The most waiting requests of a tenant of weight 1 for each free place. A tenant that is alone fills 8 of 9 places.
_PER_FREE_PLACE = 8


class _Tenant:
    """A tenant. `served`: its tokens divided by its weight. `order` breaks ties. `in_heap`: whether the heap has an
    entry of it."""

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
        # `_active`: tenants with waiting requests. `_idle`: tenants without, ordered by their last change, the oldest
        # first.
        self._active: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()
        # Entries of tenants that have become idle are skipped.
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._length = 0
        self._weights = 0
        # The tenant served last; at first, one that is nobody's.
        self._last = _Tenant("", 0, 0.0)
        self._tenants = 0
        self._popped = 0

    def push(self, request: Request) -> None:
        """Add the request to its tenant's queue. If the tenant was idle or unknown, it becomes active, and its counter
        may be raised (see `_activate`). The tenant's weight is that of its latest request."""
        context = request.context
        tenant = self._active.get(context.tenant) or self._activate(context.tenant)
        self._weights += context.weight - tenant.weight
        tenant.weight = context.weight
        tenant.queue.push(request)
        self._length += 1

    def pop(self) -> Request | None:
        """Remove and return the next request of the tenant with the lowest counter; None when empty. The request's
        order key becomes the number of requests popped so far, and the tenant is charged for the prompt. A tenant
        without further requests becomes idle."""
        tenant = self._first()
        if tenant is None:
            return None
        request = tenant.queue.pop()
        if request is None:
            return None
        self._length -= 1
        self._last = tenant
        self._popped += 1
        request.take_order_key(self._popped)
        # The prompt is charged at once, because several requests may be handed out before the first is computed. It is
        # charged while the tenant is active, because `charge` finds active tenants first.
        self.charge(request.context, request.prompt_len)
        if not len(tenant.queue):
            self._deactivate(tenant)
        return request

    def next_key(self) -> int | None:
        """Return None: order keys are set by `pop`."""
        return None

    def discard(self, request: Request) -> None:
        """Count out a request that has left while it waited, and whose state is no longer QUEUED. A tenant without
        further requests becomes idle. If the heap then has over 64 more entries of idle tenants than of active ones,
        the entries of idle tenants are removed."""
        tenant = self._active[request.context.tenant]
        tenant.queue.discard(request)
        self._length -= 1
        if not len(tenant.queue):
            self._deactivate(tenant)
            if len(self._heap) > 2 * len(self._active) + _SWEEP:
                self._sweep()

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Raise the tenant's counter by `tokens` divided by the request's weight. An idle or unknown tenant is charged
        too, an unknown one from `_least` on, and becomes the latest of the remembered ones (see `_remember`). `pop`
        charges the prompt, and callers charge the output."""
        tenant = self._active.get(context.tenant)
        if tenant is None:
            tenant = self._idle.get(context.tenant) or self._new_tenant(context.tenant, self._least())
            self._remember(tenant)
        tenant.served += tokens / context.weight

    def room(self, context: RequestContext, free: int) -> bool:
        """Whether the tenant may have one more request waiting: it has none, or fewer than 8 times the request's weight
        for each of the `free` places. Requests that were popped do not count as waiting here. Each tenant so leaves
        places to others; the more tenants there are, the more places stay free."""
        tenant = self._active.get(context.tenant)
        return tenant is None or len(tenant.queue) < _PER_FREE_PLACE * context.weight * free

    def requests_ahead(self, context: RequestContext) -> float:
        """Return approximately how many requests are handed out before a new one, as if all requests had the same size.
        These are the requests of its own tenant that have the same priority or go before it, and the shares that other
        tenants get meanwhile."""
        tenant = self._active.get(context.tenant)
        own = tenant.queue.requests_ahead(context) if tenant else 0
        others = self._weights - (tenant.weight if tenant else 0)
        waiting = self._length - (len(tenant.queue) if tenant else 0)
        return own + min(waiting, (own + 1) * others / context.weight)

    def __len__(self) -> int:
        return self._length

    def _first(self) -> _Tenant | None:
        """Return the active tenant with the lowest counter, or None if there is none. At the top of the heap, entries
        of idle tenants are removed, and entries that are too low are corrected."""
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
        """Make the tenant active, whether it is idle or new, and raise its counter to `_least`. Returns the tenant."""
        least = self._least()
        tenant = self._idle.pop(name, None) or self._new_tenant(name, least)
        tenant.served = max(tenant.served, least)
        self._active[name] = tenant
        self._weights += tenant.weight
        if not tenant.in_heap:
            tenant.in_heap = True
            heapq.heappush(self._heap, (tenant.served, tenant.order, tenant))
        return tenant

    def _least(self) -> float:
        """Return the lowest counter of the active tenants or, if there are none, the present counter of the tenant
        served last."""
        return (self._first() or self._last).served

    def _new_tenant(self, name: str, served: float) -> _Tenant:
        self._tenants += 1
        return _Tenant(name, self._tenants, served)

    def _deactivate(self, tenant: _Tenant) -> None:
        """Make a tenant without waiting requests idle: take its weight out of the sum of active weights, give it an
        empty queue, and remember it with its counter (see `_remember`). Its entry in the heap stays, and is skipped
        later."""
        del self._active[tenant.name]
        self._weights -= tenant.weight
        # A queue that was emptied by discards may still have entries of requests that have left.
        tenant.queue = OrderedQueue(priority_level)
        self._remember(tenant)

    def _remember(self, tenant: _Tenant) -> None:
        """Note that an idle tenant has changed. Of more than 4096 idle tenants, the one whose last change is the oldest
        is forgotten, and its counter is lost."""
        self._idle[tenant.name] = tenant
        self._idle.move_to_end(tenant.name)
        if len(self._idle) > _REMEMBERED:
            self._idle.popitem(last=False)

    def _sweep(self) -> None:
        """Rebuild the heap from the active tenants only, so that aborts cannot make the heap grow without bound."""
        for _, _, tenant in self._heap:
            tenant.in_heap = False
        self._heap = [(tenant.served, tenant.order, tenant) for tenant in self._active.values()]
        for tenant in self._active.values():
            tenant.in_heap = True
        heapq.heapify(self._heap)
