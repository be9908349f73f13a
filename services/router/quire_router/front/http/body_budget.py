"""Bounds the memory of HTTP bodies in this process, from their arrival until their prompts have been tokenized.

The first 64 KiB of each body are free. `--max-connections` bounds their sum, and so slow or large bodies never block a
small one. Bytes beyond 64 KiB count when they arrive, whatever Content-Length says. Each counts twice, since a body and
what was parsed of it exist at the same time, and later the parsed prompt and the message to a tokenizer. A tenant may
use up to half of the bytes that are free without it, so that no tenant alone takes all of them. This module knows
nothing of the contents of bodies.
"""

from __future__ import annotations

from collections import Counter

from quire_common.errors import Unavailable
from quire_router import metrics

FREE_BYTES = 64 * 1024
COPIES = 2
BODY_MEMORY_FULL = "BODY_MEMORY_FULL"
_RETRY_AFTER_S = 1.0


class BodyBudget:
    """The budget of one process: at most `max_bytes` beyond the free bytes. With tenants, a tenant gets at most
    half."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_tenant: Counter[str] = Counter()
        self.held = 0

    def lease(self, tenant: str) -> BodyLease:
        """Return the lease of one body, which holds nothing yet. `tenant` is '' if the router has no keys."""
        return BodyLease(self, tenant)

    def acquire(self, tenant: str, num_bytes: int) -> None:
        """Reserve bytes for a tenant. Raises Unavailable, with a retry delay, if fewer bytes would then be left than
        the tenant holds in all. For the tenant '', the bytes only have to fit."""
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
        """Give back bytes that the tenant had acquired."""
        self._add(tenant, -num_bytes)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def _add(self, tenant: str, num_bytes: int) -> None:
        """Add bytes (negative: subtract) to the sum, to the tenant's sum and to the metric."""
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
        """Hold bytes that have arrived. Only bytes beyond the body's first 64 KiB count, each twice. Raises Unavailable
        if the budget has no room for these bytes; those of earlier calls stay held."""
        more = COPIES * max(0, self._size + num_bytes - FREE_BYTES) - self._held
        if more:
            self._budget.acquire(self.tenant, more)
        self._size += num_bytes
        self._held += more

    def release(self) -> None:
        """Release all that the lease holds. Idempotent."""
        held, self._held = self._held, 0
        if held:
            self._budget.release(self.tenant, held)
