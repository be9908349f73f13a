"""Limits the number of sequences that a tenant runs at once, over all routers. A request beyond the limit is refused at
once.

With Redis, each router has a lease in Redis, which says how many sequences the router runs. One place is one sequence.
A call to Redis asks for all requests that wait when the call begins. So a request usually waits for two calls at most,
however many requests wait. Places are given back in the background. While Redis does not answer, each router counts
only its own places.
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

# A lease is renewed after this share of its life.
_RENEW_SHARE = 0.3
log = get_logger(__name__)


class ConcurrencyLimits:
    """The concurrency limits of this process; all methods run in its event loop. For each tenant with places, one task
    calls Redis, one call at a time, so that the last call always has the present number of places."""

    def __init__(self, shared: SharedConcurrency | None = None, backoff: RedisBackoff | None = None) -> None:
        self._shared = shared
        self._backoff = backoff or RedisBackoff()
        self._tenants: dict[str, TenantPlaces] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def enter(self, tenant: str, limit: int, places: int) -> None:
        """Take `places`, one per sequence, for a request of the tenant. This router's own count is checked first. With
        Redis, then wait until Redis has decided over all routers. Without Redis, or for a second after Redis failed,
        this router's count decides alone.

        A `limit` of 0 means no limit: nothing is counted. Raises Overloaded with a retry time, and counts that, if the
        places that are held or asked for leave too few. Raises InvalidArgument if `places` alone exceeds the limit. A
        cancelled call takes no places.
        """
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
        # Requests that wait for Redis count, too, so that the limit also bounds their number.
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
        """Give back places that `enter` took under this limit; Redis is told in the background. Without `ran`, the
        request never ran, so these places do not count in the rate from which the retry time of refused requests is
        computed."""
        if limit:
            known = self._tenants[tenant]
            known.add(-places)
            self._tell_later(tenant, known)
            if ran:
                known.returned.add(places)

    def places(self, tenant: str) -> TenantPlaces:
        """Return the places that the tenant holds in this router. The caller must not change the object."""
        return self._tenants[tenant]

    async def close(self) -> None:
        """Wait up to a second until Redis knows that this router holds no places. Then cancel the tasks that still run,
        and close the connections."""
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
        """Start the tenant's task for Redis, unless it runs already."""
        if tenant not in self._keepers:
            self._keepers[tenant] = asyncio.create_task(self._keep(shared, tenant, known), name="concurrency limits")

    async def _keep(self, shared: SharedConcurrency, tenant: str, known: TenantPlaces) -> None:
        """Run the tenant's calls to Redis: ask Redis to admit the requests that wait, report places that were given
        back, and renew the lease. While Redis is not called after a failure, decide by this router's count.

        Ends when the tenant holds no places and Redis knows it. At the end, decide about all requests that still wait,
        and forget the task.
        """
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
        """Tell Redis in one call how many places are held, and let it admit or refuse the requests that wait. If the
        call fails in any way, begin a backoff, decide by the count of this router, and let Redis be told again
        later."""
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
    """Raise Overloaded, with a retry time, if the held places and `others` leave too few of `limit`; count the refusal
    in the metrics. `others` are places for which requests of this router wait, or places of other routers."""
    held = known.held + others
    if held + places > limit:
        metrics.rate_limited.labels("concurrent").inc()
        raise Overloaded(
            "TOO_MANY_CONCURRENT",
            f"This API key has {held} of {limit} sequences in progress.",
            "Retry after the given time, or ask for a higher limit.",
            retry_after_s=spread_retry_s(known.returned.time_for_s(places)),
        )
