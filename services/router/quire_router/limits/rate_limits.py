"""Rate limits per tenant. A request is admitted or refused at once. Its tokens are charged later.

A request is admitted if its tenant's request bucket has a request left and its token bucket a token. A prompt is
charged by an estimate, which is corrected when the prompt is encoded. An answer is charged when it ends. So the tokens
in flight may bring a bucket into debt, and then no request is admitted until the bucket has a token again. Over time
the limit therefore holds exactly, even if clients do not say how long their answers will be.

With Redis, all routers share the buckets. Each router keeps a copy of the levels in Redis. If Redis stops answering,
the router limits by this copy. If Redis comes back without its data, the router sends the levels of the copy.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire_common.errors import Overloaded
from quire_router import metrics
from quire_router.limits.bucket import MINUTE_S, UNLIMITED, Levels, TenantBuckets
from quire_router.limits.redis_backoff import BACKOFF_S, RedisBackoff
from quire_router.limits.shared_buckets import FAILURES

if TYPE_CHECKING:
    from quire_router.limits.shared_buckets import SharedBuckets
    from quire_router.principal import KeyLimits, Principal

_KINDS = ("requests", "tokens")
# OpenAI's names.
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}".encode() for kind in _KINDS for what in ("limit", "remaining", "reset")
)


class RateLimited(Overloaded):
    """A tenant has used up its requests or tokens for this minute. `levels` has what is left in both buckets."""

    def __init__(self, kind: str, per_minute: int, levels: Levels) -> None:
        super().__init__(
            "RATE_LIMITED",
            f"This API key has used its {per_minute} {kind} per minute.",
            "Retry after the given time, or ask for a higher limit.",
            retry_after_s=max(0.001, (1 - getattr(levels, kind)) * MINUTE_S / per_minute),
        )
        self.levels = levels


class RateLimits:
    """The rate limits of this process; all methods run in its event loop. The number of tenants is bounded, because
    they are those of the key file."""

    def __init__(self, shared: SharedBuckets | None = None, backoff: RedisBackoff | None = None) -> None:
        self._shared = shared
        self._backoff = backoff or RedisBackoff()
        self._tenants: dict[str, tuple[KeyLimits, TenantBuckets]] = {}
        # `_debts` has the charges that were not sent to Redis yet, by tenant. `_sending` is the charge that is being
        # sent: its tenant, tokens and number.
        self._debts: dict[str, int] = {}
        self._sending: tuple[str, int, int] | None = None
        self._number = 0
        self._collector: asyncio.Task[None] | None = None
        metrics.limits_shared.set(0 if shared is None else 1)

    async def admit(self, principal: Principal) -> Levels:
        """Take one request of the tenant if its request bucket has at least 1 left and its token bucket too. Returns
        the levels after that; infinite levels if the key has no limits per minute. Otherwise counts the refusal in the
        metrics and raises RateLimited, which names the bucket that is empty and has the levels.

        The buckets in Redis decide, and their levels replace the local ones. While Redis does not answer, the local
        buckets decide.
        """
        limits = principal.limits
        buckets = self._buckets(principal)
        if not limits.per_minute:
            return UNLIMITED
        admitted = None
        if self._shared is not None and not self._backoff.left_s:
            try:
                tenant = principal.tenant
                admitted, levels = await self._shared.admit(tenant, limits, self._known(tenant, buckets))
                self._take_shared_levels(tenant, buckets, levels)
            except FAILURES as error:
                self._backoff.begin(error)
        if admitted is None:
            now_s = time.monotonic()  # read once, because a bucket may fill between two readings
            admitted, levels = buckets.admit(now_s), buckets.levels(now_s)
        if not admitted:
            # Redis rounds levels: one that is just below 1 may come as 1.
            kind = "requests" if levels.requests < 1 or not limits.tokens_per_minute else "tokens"
            metrics.rate_limited.labels(kind).inc()
            refused = RateLimited(kind, getattr(limits, f"{kind}_per_minute"), levels)
            metrics.shed(refused, principal.tenant_name)
            raise refused
        return levels

    def charge(self, tenant: str, tokens: int) -> None:
        """Subtract tokens from the tenant's local bucket, which may go into debt. A negative `tokens` gives tokens
        back. Never waits: a background task sends the charge to Redis, if there is one. Does nothing for a tenant
        without a token limit, or one for which `admit` has made no buckets."""
        known = self._tenants.get(tenant)
        if known is None or not known[0].tokens_per_minute or not tokens:
            return
        known[1].charge(tokens, time.monotonic())
        if self._shared is not None:
            self._debts[tenant] = self._debts.get(tenant, 0) + tokens
            if self._collector is None or self._collector.done():
                self._collector = asyncio.create_task(self._collect(), name="rate limits")

    async def close(self) -> None:
        """Wait up to a second until Redis has got all charges, then stop sending and close the connections."""
        if self._collector is not None:
            await asyncio.wait({self._collector}, timeout=BACKOFF_S)
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
        if self._shared is not None:
            await self._shared.close()

    def _buckets(self, principal: Principal) -> TenantBuckets:
        """Return the tenant's local buckets, with the limits of this key. At the tenant's first request, make them
        full. If the key file has changed the limits, the buckets keep their levels, but at most the new allowance of a
        minute (see `Bucket.resize`)."""
        limits = principal.limits
        known, buckets = self._tenants.get(principal.tenant, (None, None))
        if buckets is not None and known == limits:
            return buckets
        now_s = time.monotonic()
        if buckets is None:
            buckets = TenantBuckets(limits, now_s)
        else:
            buckets.resize(limits, now_s)
        self._tenants[principal.tenant] = limits, buckets
        return buckets

    async def _collect(self) -> None:
        """Send all charges to Redis, with one call per tenant, until none is left; set the local levels from each
        answer. After a failure, wait for the backoff to end. A charge that Redis did not answer is sent again under the
        same number, so that it counts only once."""
        while self._shared is not None and (self._sending is not None or self._debts):
            if self._backoff.left_s:
                await asyncio.sleep(self._backoff.left_s)
            if self._sending is None:
                self._number += 1
                self._sending = (*self._debts.popitem(), self._number)
            tenant, tokens, number = self._sending
            limits, buckets = self._tenants[tenant]
            try:
                levels = await self._shared.charge(tenant, limits, self._known(tenant, buckets), tokens, number)
            except FAILURES as error:
                self._backoff.begin(error)
            else:
                self._sending = None
                self._take_shared_levels(tenant, buckets, levels)

    def _owed(self, tenant: str) -> int:
        """Return the tokens of the tenant that were charged here and that Redis has not acknowledged."""
        sending = self._sending[1] if self._sending is not None and self._sending[0] == tenant else 0
        return self._debts.get(tenant, 0) + sending

    def _known(self, tenant: str, buckets: TenantBuckets) -> Levels:
        """Return the levels that Redis should have now. The local token level is without charges that Redis has not
        acknowledged, so these are added back. A Redis that has lost its data begins with these levels."""
        levels = buckets.levels(time.monotonic())
        return Levels(levels.requests, levels.tokens + self._owed(tenant))

    def _take_shared_levels(self, tenant: str, buckets: TenantBuckets, levels: Levels) -> None:
        """Set the local buckets to the levels of Redis, minus the token charges that Redis has not acknowledged. Note
        that Redis answers."""
        buckets.set(Levels(levels.requests, levels.tokens - self._owed(tenant)), time.monotonic())
        self._backoff.answered()


def limit_headers(limits: KeyLimits, levels: Levels) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's x-ratelimit headers. For requests and for tokens: the limit per minute, the rest (a whole number,
    at least 0), and the time until the bucket is full again ("1.500s"). A kind without a limit gets no headers."""
    headers = []
    for kind, names in zip(_KINDS, (LIMIT_HEADERS[:3], LIMIT_HEADERS[3:]), strict=True):
        per_minute, level = getattr(limits, f"{kind}_per_minute"), getattr(levels, kind)
        if per_minute:
            reset_s = max(0.0, per_minute - level) * MINUTE_S / per_minute
            values = (str(per_minute), str(max(0, int(level))), f"{reset_s:.3f}s")
            headers += [(name, value.encode()) for name, value in zip(names, values, strict=True)]
    return headers
