"""How many sequences of a tenant run at once, over all routers. A request beyond the limit is refused at once.

With Redis, each router holds a lease there with the number of sequences that it runs. A place is taken when Redis
agrees, and given back in the background. While Redis is away, each router counts its own places alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, Overloaded, spread_retry_s
from quire_router import metrics
from quire_router.limits.redis_rest import REST_S, RedisRest
from quire_router.limits.return_rate import ReturnRate
from quire_router.limits.shared_buckets import FAILURES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_router.limits.shared_concurrency import SharedConcurrency

# Of a lease's life, after which it is renewed.
_RENEW_SHARE = 0.3


class _Tenant:
    """`lock`: one call to Redis at a time, so that the last one says what is held. `asked`: places for which requests
    wait for the lock or for Redis. The limit counts them, so that it also bounds these requests."""

    def __init__(self) -> None:
        self.held = 0
        self.asked = 0
        self.lock = asyncio.Lock()
        self.returned = ReturnRate()

    def add(self, places: int) -> None:
        """Hold so many places more; fewer, where the number is negative."""
        self.held += places

    @contextlib.contextmanager
    def asking_for(self, places: int) -> Iterator[None]:
        """Count places as asked for while the `with` block lasts."""
        self.asked += places
        try:
            yield
        finally:
            self.asked -= places


class ConcurrencyLimits:
    """One per process; all methods run in its event loop."""

    def __init__(self, shared: SharedConcurrency | None = None, rest: RedisRest | None = None) -> None:
        self._shared = shared
        self._rest = rest or RedisRest()
        self._tenants: dict[str, _Tenant] = {}
        # Tenants of whom Redis does not know what they hold.
        self._stale: set[str] = set()
        self._wake = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None

    async def enter(self, tenant: str, limit: int, places: int) -> None:
        """Take places of the tenant's limit; 0: it has none. Raises Overloaded where too few are free, and
        InvalidArgument where there are not so many at all."""
        if not limit:
            return
        if places > limit:
            raise InvalidArgument(
                "TOO_MANY_SEQUENCES",
                f"The request asks for {places} sequences; this API key may run {limit} at once.",
                "Lower n, or split the list of prompts.",
                param="n",
            )
        known = self._tenants.setdefault(tenant, _Tenant())
        self._check(known, limit, places, others=known.asked)
        if self._shared is not None and not self._rest.left_s:
            await self._enter_shared(self._shared, tenant, limit, places)
        else:
            self._add(tenant, known, places)

    def leave(self, tenant: str, limit: int, places: int, *, ran: bool = True) -> None:
        """Give places back that `enter` took under this limit. Without `ran`, they say nothing of when others will be
        free."""
        if limit:
            known = self._tenants[tenant]
            self._add(tenant, known, -places)
            if ran:
                known.returned.add(places)

    async def close(self) -> None:
        """Wait up to a second until Redis knows that nothing is held, then close the connections."""
        if self._reporter is not None:
            await asyncio.wait({self._reporter}, timeout=REST_S)
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
        if self._shared is not None:
            await self._shared.close()

    async def _enter_shared(self, shared: SharedConcurrency, tenant: str, limit: int, places: int) -> None:
        """Take places if Redis agrees or, once it has failed, if they are free here. Raises Overloaded."""
        known = self._tenants[tenant]
        with known.asking_for(places):
            async with known.lock:
                await self._ask(shared, tenant, limit, places)
        self._add(tenant, known, places)

    async def _ask(self, shared: SharedConcurrency, tenant: str, limit: int, places: int) -> None:
        """Return once Redis counts these places too, or has failed. Raises Overloaded where others hold too many."""
        known = self._tenants[tenant]
        while not self._rest.left_s:
            try:
                taken, others = await shared.take(tenant, known.held + places, limit)
            except FAILURES as error:
                self._rest.begin(error)
                self._mark_stale(tenant)
            except BaseException:
                self._mark_stale(tenant)  # Redis may have counted places that nobody has
                raise
            else:
                self._rest.answered()
                if taken:
                    return
                # Ask again only if places were given back here while Redis answered.
                self._check(known, limit, places, others=others)

    def _check(self, known: _Tenant, limit: int, places: int, *, others: int) -> None:
        """Raise Overloaded where the held places and `others` leave too few. `others` wait for Redis here, or are other
        routers'."""
        held = known.held + others
        if held + places > limit:
            metrics.rate_limited.labels("concurrent").inc()
            raise Overloaded(
                "TOO_MANY_CONCURRENT",
                f"This API key has {held} of {limit} sequences in progress.",
                "Retry after the given time, or ask for a higher limit.",
                retry_after_s=spread_retry_s(known.returned.time_for_s(places)),
            )

    def _add(self, tenant: str, known: _Tenant, places: int) -> None:
        """Change what is held here. Redis is told of places that are free again; the next renewal tells the rest."""
        known.add(places)
        if places < 0:
            self._mark_stale(tenant)
        self._start_reporter()

    def _mark_stale(self, tenant: str) -> None:
        self._stale.add(tenant)
        self._wake.set()
        self._start_reporter()

    def _start_reporter(self) -> None:
        if self._shared is not None and (self._reporter is None or self._reporter.done()):
            self._reporter = asyncio.create_task(self._report(self._shared), name="concurrency limits")

    async def _report(self, shared: SharedConcurrency) -> None:
        """Tell Redis what is held, where it does not know that or its lease needs to be renewed, until nothing is
        held."""
        renew_at_s = time.monotonic() + shared.lease_s * _RENEW_SHARE
        while self._stale or any(known.held for known in self._tenants.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + renew_at_s - time.monotonic()):
                    await self._wake.wait()
            self._wake.clear()
            if time.monotonic() >= renew_at_s:
                renew_at_s = time.monotonic() + shared.lease_s * _RENEW_SHARE
                self._stale.update(tenant for tenant, known in self._tenants.items() if known.held)
            while self._stale:
                await asyncio.sleep(self._rest.left_s)
                await self._report_tenant(shared, self._stale.pop())

    async def _report_tenant(self, shared: SharedConcurrency, tenant: str) -> None:
        """Tell Redis what a tenant holds; where that fails, note that it is to be told again."""
        known = self._tenants[tenant]
        async with known.lock:
            try:
                await shared.hold(tenant, known.held)
            except FAILURES as error:
                self._rest.begin(error)
                self._stale.add(tenant)
            else:
                self._rest.answered()
