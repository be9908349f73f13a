"""Fair between tenants by tokens: the tenant that was served least goes next, first come first served within it.

Each tenant has a counter of the tokens computed for it. One that comes back from idleness is lifted to the least
counter among the active, so that absence earns no credit; what it took shortly before still counts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext

_REMEMBERED = 4096
_SWEEP = 64


class FairQueue:
    """Virtual token counters over one queue per tenant."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Request]] = {}
        self._waiting: dict[str, int] = {}
        # Least recently used first; bounded, since tenants are the clients' to name.
        self._served: OrderedDict[str, int] = OrderedDict()
        self._floor = 0
        self._popped = 0

    def push(self, request: Request) -> None:
        """Append the request to its tenant's queue. A tenant that comes back from idleness is lifted to the least
        counter among the active ones."""
        tenant = request.context.tenant
        if tenant not in self._queues:
            self._queues[tenant] = deque()
            self._waiting[tenant] = 0
            self._set(tenant, max(self._served.get(tenant, 0), self._least()))
        self._queues[tenant].append(request)
        self._waiting[tenant] += 1

    def pop(self) -> Request | None:
        """Remove and return the oldest request of the tenant that was served least, and charge the tenant for its
        prompt; None when empty. Requests that are no longer QUEUED are dropped."""
        while self._queues:
            tenant = min(self._queues, key=lambda name: self._served[name])
            queue = self._queues[tenant]
            while queue and queue[0].state is not State.QUEUED:
                queue.popleft()
            if not queue:
                self._forget(tenant)
                continue
            request = queue.popleft()
            self._waiting[tenant] -= 1
            self._floor = self._served[tenant]
            self._popped += 1
            request.take_order_key(self._popped)
            # The prompt counts at once: several may be handed out before the first is computed.
            self.charge(tenant, request.prompt_len)
            if not queue:
                self._forget(tenant)
            return request
        return None

    def next_key(self) -> int | None:
        """The order key is given at `pop`."""
        return None

    def discard(self, request: Request) -> None:
        """Note that a request inside has left. A tenant's queue is swept when most of it is gone, so that aborts cannot
        grow it."""
        tenant = request.context.tenant
        self._waiting[tenant] -= 1
        queue = self._queues[tenant]
        if len(queue) > 2 * self._waiting[tenant] + _SWEEP or not self._waiting[tenant]:
            self._queues[tenant] = deque(r for r in queue if r.state is State.QUEUED)
            if not self._queues[tenant]:
                self._forget(tenant)

    def charge(self, tenant: str, tokens: int) -> None:
        """See QueuePolicy; the prompt was charged by `pop`."""
        self._set(tenant, self._served.get(tenant, self._floor) + tokens)

    def room(self, tenant: str, max_waiting: int) -> bool:
        """Whether the tenant has less than its share waiting. A share stays free for the next tenant, so that one
        tenant's flood refuses only itself."""
        tenants = len(self._waiting) + (tenant not in self._waiting)
        return self._waiting.get(tenant, 0) < max(max_waiting // (tenants + 1), 1)

    def requests_ahead(self, context: RequestContext) -> float:
        """Return about how many requests are served until the tenant's own and one more are, each tenant in turn."""
        tenant = context.tenant
        tenants = len(self._waiting) + (tenant not in self._waiting)
        own = self._waiting.get(tenant, 0)
        return min(len(self), own + (own + 1) * (tenants - 1))

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def _least(self) -> int:
        return min((self._served[name] for name in self._queues if name in self._served), default=self._floor)

    def _set(self, tenant: str, served: int) -> None:
        """Set the tenant's counter. Where too many are remembered, the idle tenant's that changed longest ago is
        dropped."""
        self._served[tenant] = served
        self._served.move_to_end(tenant)
        if len(self._served) > _REMEMBERED + len(self._queues):
            oldest = next(name for name in self._served if name not in self._queues)
            del self._served[oldest]

    def _forget(self, tenant: str) -> None:
        """An idle tenant keeps its counter alone."""
        del self._queues[tenant], self._waiting[tenant]
