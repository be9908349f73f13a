"""How many sequences of a tenant run at once, over all routers. A request beyond the limit is refused at once.

With Redis, each router holds a lease there with the number of sequences that it runs. All requests that wait for Redis
as a call begins go in that one call, so that a slow Redis holds a request for two calls at most, however many wait.
Places are given back in the background. While Redis is away, each router counts its own places alone.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument, Overloaded, spread_retry_s
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.limits.redis_backoff import BACKOFF_S, RedisBackoff
from quire_router.limits.shared_buckets import FAILURES
from quire_router.limits.tenant_places import TenantPlaces

if TYPE_CHECKING:
    from quire_router.limits.shared_concurrency import SharedConcurrency

# Of a lease's life, after which it is renewed.
_RENEW_SHARE = 0.3
log = get_logger(__name__)


class ConcurrencyLimits:
    """One per process; all methods run in its event loop. A task per tenant that holds something speaks to Redis, one
    call at a time: the last call says what is held."""

    def __init__(self, shared: SharedConcurrency | None = None, backoff: RedisBackoff | None = None) -> None:
        self._shared = shared
        self._backoff = backoff or RedisBackoff()
        self._tenants: dict[str, TenantPlaces] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def enter(self, tenant: str, limit: int, places: int) -> None:
        """Take places of the tenant's limit; 0: it has none. Raises Overloaded where too few are free, and
        InvalidArgument where there are not so many at all. A call that is cancelled takes none."""
        if not limit:
            return
        if places > limit:
            raise InvalidArgument(
                "TOO_MANY_SEQUENCES",
                f"The request asks for {places} sequences; this API key may run {limit} at once.",
                "Lower n, or split the list of prompts.",
                param="n",
            )
        known = self._tenants.setdefault(tenant, TenantPlaces())
        # Those who wait for Redis count too, so that the limit also bounds these requests.
        others: int | None = known.asked
        while others is not None:
            _check(known, limit, places, others=others)
            if self._shared is None or self._backoff.left_s:
                known.add(places)
                others = None
            else:
                self._keep_lease(self._shared, tenant, known)
                # Redis is asked again only if places were given back here while it answered.
                others = await known.wait_for(places, limit)
        self._tell_later(tenant, known)

    def leave(self, tenant: str, limit: int, places: int, *, ran: bool = True) -> None:
        """Give places back that `enter` took under this limit. Without `ran`, they say nothing of when others will be
        free."""
        if limit:
            known = self._tenants[tenant]
            known.add(-places)
            self._tell_later(tenant, known)
            if ran:
                known.returned.add(places)

    def places(self, tenant: str) -> TenantPlaces:
        """Return what the tenant holds in this router. The caller changes nothing of it."""
        return self._tenants[tenant]

    async def close(self) -> None:
        """Wait up to a second until Redis knows that nothing is held, then close the connections."""
        if keepers := set(self._keepers.values()):
            await asyncio.wait(keepers, timeout=BACKOFF_S)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        if self._shared is not None:
            await self._shared.close()

    def _tell_later(self, tenant: str, known: TenantPlaces) -> None:
        if self._shared is not None:
            self._keep_lease(self._shared, tenant, known)

    def _keep_lease(self, shared: SharedConcurrency, tenant: str, known: TenantPlaces) -> None:
        """See to it that a task speaks to Redis for this tenant."""
        if tenant not in self._keepers:
            self._keepers[tenant] = asyncio.create_task(self._keep(shared, tenant, known), name="concurrency limits")

    async def _keep(self, shared: SharedConcurrency, tenant: str, known: TenantPlaces) -> None:
        """Ask Redis for the requests that wait, tell it what was given back, and renew the lease, until nothing is
        held. No request waits for this task once it has ended."""
        renew_at_s = 0.0
        try:
            while known.busy:
                if left_s := self._backoff.left_s:
                    known.admit_all()
                    await asyncio.sleep(left_s)
                elif known.untold or time.monotonic() >= renew_at_s:
                    renew_at_s = time.monotonic() + shared.lease_s * _RENEW_SHARE
                    await self._tell(shared, tenant, known)
                else:
                    await known.changed(renew_at_s - time.monotonic())
        finally:
            known.admit_all()
            del self._keepers[tenant]

    async def _tell(self, shared: SharedConcurrency, tenant: str, known: TenantPlaces) -> None:
        """Tell Redis what is held, and ask for the requests that wait. Where that fails, they are admitted if their
        places are free here, and Redis is told again later."""
        asking = [(request.places, request.limit) for request in known.take_waiting()]
        try:
            admitted, others = await shared.hold(tenant, known.held, asking)
        except Exception as error:
            if not isinstance(error, FAILURES):
                log.exception("the lease of a tenant's places could not be told to Redis")
            self._backoff.begin(error)
            known.mark_untold()
            known.admit_all()
        else:
            self._backoff.answered()
            known.decide(admitted, others)


def _check(known: TenantPlaces, limit: int, places: int, *, others: int) -> None:
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
