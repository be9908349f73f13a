"""How many bytes of HTTP bodies this process holds, from their arrival until they have become jobs.

A body's first 64 KiB are free, since `--max-connections` bounds them: no number of slow or large bodies keeps a small
one out. What is beyond counts as it arrives, whatever its Content-Length promises. A tenant may take as much as it
leaves free, which is half of all, so that others always find room. Knows nothing of what the bodies are.
"""

from __future__ import annotations

from collections import Counter

from quire_common.errors import Unavailable
from quire_router import metrics

FREE_BYTES = 64 * 1024
BODY_MEMORY_FULL = "BODY_MEMORY_FULL"
_RETRY_AFTER_S = 1.0


class BodyBudget:
    """One per process. At most `max_bytes` beyond the free ones; of one tenant half, where there are tenants."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_tenant: Counter[str] = Counter()
        self.held = 0

    def lease(self, tenant: str) -> BodyLease:
        """Return the lease of one body, which holds nothing yet. `tenant` '': nobody has a key."""
        return BodyLease(self, tenant)

    def acquire(self, tenant: str, num_bytes: int) -> None:
        """Reserve bytes for a tenant. Raises Unavailable if too few are left."""
        left = self._max_bytes - self.held - num_bytes
        reserved = self._by_tenant[tenant] + num_bytes if tenant else 0
        if left < reserved:
            raise Unavailable(
                BODY_MEMORY_FULL,
                f"Long bodies of other requests fill the {self._max_bytes >> 20} MiB that this router has for them.",
                f"Retry after the given time, send at most {FREE_BYTES >> 10} KiB, or raise --max-bodies-mib.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._add(tenant, num_bytes)

    def release(self, tenant: str, num_bytes: int) -> None:
        """Release bytes that the tenant had acquired."""
        self._add(tenant, -num_bytes)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def _add(self, tenant: str, num_bytes: int) -> None:
        self.held += num_bytes
        self._by_tenant[tenant] += num_bytes
        metrics.http_body_bytes.set(self.held)


class BodyLease:
    """The part of the budget that one body holds."""

    __slots__ = ("_budget", "_held", "_size", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self._size = self._held = 0

    def grow(self, num_bytes: int) -> None:
        """Hold bytes that have arrived. Raises Unavailable where the budget has no room for them."""
        more = max(0, self._size + num_bytes - FREE_BYTES) - self._held
        if more:
            self._budget.acquire(self.tenant, more)
        self._size += num_bytes
        self._held += more

    def release(self) -> None:
        """Give back all that is held. Idempotent."""
        held, self._held = self._held, 0
        if held:
            self._budget.release(self.tenant, held)
