"""Where responses are kept: in this process within bounds, or in Redis for all routers. Values are bytes to it.

A response is its tenant's alone. What is kept goes after `ttl_s`, in memory also when room is needed, oldest first. A
tenant with a share of its own loses its oldest response when the share is full, here and in Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Protocol

from redis.exceptions import RedisError

from quire_common.discovery.redis_client import open_redis
from quire_common.errors import Unavailable
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.front.http.responses.redis_shares import RedisShares, response_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_router.config import RouterConfig

log = get_logger(__name__)
MOST_WAIT_S = 0.04
_CLOSE_S = 1.0


class ResponseStore(Protocol):
    """`shared`: other routers see what is put here. Nothing blocks the event loop."""

    shared: bool

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value; None where none is kept (any more). Raises Unavailable."""

    async def put(self, tenant: str, response_id: str, value: bytes, *, replace: bool = True) -> None:
        """Keep a value. Without `replace`, only where none is kept, which is looked up in the same step. A failure is
        logged and counted, not raised: the response itself is not in danger."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a value; returns whether there was one. Raises Unavailable."""

    async def close(self) -> None:
        """Close the store's connections."""


def unlimited(tenant: str) -> int:
    """Return the share of every tenant where none has one: 0."""
    return 0


class MemoryStore:
    """At most `max_bytes`, and of each tenant `share_of(tenant)` if that is not 0. A longer value is not kept."""

    shared = False

    def __init__(self, max_bytes: int, ttl_s: float, share_of: Callable[[str], int] = unlimited) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._share_of = share_of
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        # By tenant, the length of each of its values, oldest first, and their sum.
        self._lengths: dict[str, dict[str, int]] = {}
        self._tenant_bytes: Counter[str] = Counter()

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        self._expire()
        found = self._kept.get((tenant, response_id))
        return found[1] if found is not None else None

    async def put(self, tenant: str, response_id: str, value: bytes, *, replace: bool = True) -> None:
        """Keep a value for `ttl_s`, and drop the oldest others until it fits. A value that cannot fit is counted, not
        kept."""
        self._expire()
        if not replace and (tenant, response_id) in self._kept:
            return
        self._drop((tenant, response_id))
        share = self._share_of(tenant) or self._max_bytes
        if len(value) > min(share, self._max_bytes):
            metrics.responses_dropped.labels("too_large").inc()
            return
        while self._tenant_bytes[tenant] + len(value) > share:
            self._drop((tenant, next(iter(self._lengths[tenant]))))
            metrics.responses_dropped.labels("no_room").inc()
        while self._bytes + len(value) > self._max_bytes:
            self._drop(next(iter(self._kept)))
            metrics.responses_dropped.labels("no_room").inc()
        self._kept[tenant, response_id] = (time.monotonic() + self._ttl_s, value)
        self._lengths.setdefault(tenant, {})[response_id] = len(value)
        self._tenant_bytes[tenant] += len(value)
        self._bytes += len(value)
        self._tell()

    async def delete(self, tenant: str, response_id: str) -> bool:
        found = self._drop((tenant, response_id))
        self._tell()
        return found

    async def close(self) -> None:
        """Nothing is open."""

    def _expire(self) -> None:
        """Drop the values whose time is over. They expire in the order in which they came."""
        now_s = time.monotonic()
        while self._kept:
            key, (until_s, _) = next(iter(self._kept.items()))
            if until_s > now_s:
                break
            self._drop(key)
        self._tell()

    def _drop(self, key: tuple[str, str]) -> bool:
        """Remove a value, if it is there; returns whether it was."""
        if self._kept.pop(key, None) is None:
            return False
        tenant, response_id = key
        length = self._lengths[tenant].pop(response_id)
        self._bytes -= length
        self._tenant_bytes[tenant] -= length
        if not self._lengths[tenant]:
            del self._lengths[tenant], self._tenant_bytes[tenant]
        return True

    def _tell(self) -> None:
        metrics.responses_kept_bytes.set(self._bytes)


class RedisStore:
    """One value per response, with a lifetime. Redis gets the writes of one response in their order. A read waits for
    the writes of its response that this router has begun."""

    shared = True

    def __init__(
        self, url: str, max_bytes: int, ttl_s: float, url_file: str = "", share_of: Callable[[str], int] = unlimited
    ) -> None:
        self._max_bytes = max_bytes
        self._share_of = share_of
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = open_redis(url, url_file, socket_timeout=2.0, socket_connect_timeout=2.0)
        self._shares = RedisShares(self._redis)
        # The last write under way of each key; and the bytes that all writes under way hold.
        self._writes: dict[str, asyncio.Task[None]] = {}
        self._writing_bytes = 0

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value; None where none is kept (any more). Raises Unavailable where Redis does not answer."""
        await self._written(response_key(tenant, response_id))
        try:
            found: bytes | None = await self._redis.get(response_key(tenant, response_id))
        except (RedisError, OSError) as error:
            raise _gone() from error
        return found

    async def put(self, tenant: str, response_id: str, value: bytes, *, replace: bool = True) -> None:
        """Keep a value for its lifetime. The call returns after MOST_WAIT_S at most, because a client waits for its
        answer; a slower write goes on. A value is counted, not kept, if it is too large or if writes under way leave no
        room for it. A failure of Redis is logged and counted."""
        share = self._share_of(tenant)
        if len(value) > min(share or self._max_bytes, self._max_bytes):
            metrics.responses_dropped.labels("too_large").inc()
            return
        if self._writing_bytes + len(value) > self._max_bytes:
            metrics.responses_dropped.labels("no_room").inc()
            return
        key = response_key(tenant, response_id)
        self._writing_bytes += len(value)
        write = asyncio.create_task(
            self._write(tenant, response_id, value, self._writes.get(key), share=share, replace=replace)
        )
        self._writes[key] = write
        await asyncio.wait({write}, timeout=MOST_WAIT_S)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a value; returns whether there was one. Raises Unavailable where Redis does not answer."""
        await self._written(response_key(tenant, response_id))
        try:
            if self._share_of(tenant):
                return await self._shares.delete(tenant, response_id)
            return bool(await self._redis.delete(response_key(tenant, response_id)))
        except (RedisError, OSError) as error:
            raise _gone() from error

    async def close(self) -> None:
        """Give writes under way up to a second, then close the connections."""
        if writes := set(self._writes.values()):
            _, late = await asyncio.wait(writes, timeout=_CLOSE_S)
            for write in late:
                write.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._redis.aclose()

    async def _write(
        self,
        tenant: str,
        response_id: str,
        value: bytes,
        before: asyncio.Task[None] | None,
        *,
        share: int,
        replace: bool,
    ) -> None:
        """Write a value after the write `before` of the same key."""
        key = response_key(tenant, response_id)
        try:
            if before is not None:
                await asyncio.wait({before})
            if share:
                gone = await self._shares.put(
                    tenant, response_id, value, ttl_ms=self._ttl_ms, share_bytes=share, replace=replace
                )
                metrics.responses_dropped.labels("no_room").inc(gone)
            else:
                await self._redis.set(key, value, px=self._ttl_ms, nx=not replace)
        except (RedisError, OSError) as error:
            metrics.responses_dropped.labels("redis").inc()
            log.warning("a response was not kept", reason=type(error).__name__)
        finally:
            self._writing_bytes -= len(value)
            if self._writes.get(key) is asyncio.current_task():
                del self._writes[key]

    async def _written(self, key: str) -> None:
        """Wait for the writes of this key that are under way."""
        if write := self._writes.get(key):
            await asyncio.wait({write})


def make_store(config: RouterConfig, share_of: Callable[[str], int] = unlimited) -> ResponseStore | None:
    """Make the store that is configured; `share_of` returns the bytes of a tenant's share, 0 for no limit. None where
    nothing is to be kept, or where several processes would each keep their own, for want of a Redis."""
    most, ttl_s = config.responses_max_mib << 20, config.responses_ttl_s
    if most and config.http_workers > 1 and not config.redis:
        if not config.http_worker:
            log.warning("no responses are kept: several processes need --redis for that", processes=config.http_workers)
        return None
    if not most:
        return None
    if config.redis:
        return RedisStore(config.redis, most, ttl_s, config.redis_file, share_of)
    return MemoryStore(most, ttl_s, share_of)


def _gone() -> Unavailable:
    """Make the error for a Redis that does not answer."""
    return Unavailable(
        "RESPONSE_STORE_UNAVAILABLE",
        "The store of responses does not answer.",
        "Retry; look after the router's Redis.",
        retry_after_s=1.0,
    )
