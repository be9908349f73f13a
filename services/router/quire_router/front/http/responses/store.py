"""Stores responses as bytes: in this process within bounds, or in Redis for all routers.

Only its own tenant can read a response. A stored response expires after `ttl_s`; full memory loses its oldest responses
before that. If a tenant with a quota fills it, the tenant's oldest response goes, in memory and in Redis. Running
background responses and the marks that cancel them do not count, and are never removed for room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from redis.exceptions import RedisError

from quire_common.discovery.redis_client import open_redis
from quire_common.errors import Unavailable
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.redis_state import note_redis
from quire_router import metrics
from quire_router.front.http.responses.redis_quotas import RedisQuotas, response_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_router.config import RouterConfig

log = get_logger(__name__)
MOST_WAIT_S = 0.04
_CLOSE_S = 1.0
# A mark must live until the router that runs the response has read it.
_LEAST_MARK_MS = 60_000


class StoreOutcome(Enum):
    """The outcome of storing a value. NOT_NOW: the store does not answer, or has no room at the moment."""

    KEPT = "kept"
    TOO_LARGE = "too_large"
    NOT_NOW = "not_now"


class ResponseStore(Protocol):
    """`shared`: other routers see the values of this store. No method blocks the event loop."""

    shared: bool

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value; None if none is stored (any more). Raises Unavailable if the store does not answer."""

    def most_bytes(self, tenant: str) -> int:
        """Return the size of the largest value that the store accepts from this tenant."""

    async def put(self, tenant: str, response_id: str, value: bytes, *, wait: bool = False) -> StoreOutcome:
        """Store a value, and replace an earlier one. With `wait`, return when the outcome is certain. Without it,
        return after a short time: KEPT if a slow write still goes on. A failure is then logged and counted, since the
        client gets its response anyway."""

    async def put_running(self, tenant: str, response_id: str, value: bytes) -> None:
        """Let other routers see a background response that runs in this one. This is best effort: a failure is counted,
        and other routers then do not find the response before it has ended and is stored."""

    async def mark(self, tenant: str, response_id: str, mark: bytes, *, replace: bool) -> None:
        """Leave a mark for the router that runs this response. Without `replace`, an earlier mark stays. Raises
        Unavailable if the store does not answer."""

    async def get_mark(self, tenant: str, response_id: str) -> bytes | None:
        """Return the mark of this response; None if it has none. Raises Unavailable if the store does not answer."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value. Returns whether there was one. Raises Unavailable if the store does not answer."""

    async def close(self) -> None:
        """Close the store's connections."""


def unlimited(tenant: str) -> int:
    """Return 0: tenants have no share, so each is unlimited."""
    return 0


class MemoryStore:
    """Holds at most `max_bytes`, and at most `share_of(tenant)` of each tenant if that is not 0. It does not store a
    value that is longer than that."""

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
        """Return the value; None if none is stored or it has expired."""
        self._expire()
        found = self._kept.get((tenant, response_id))
        return found[1] if found is not None else None

    def most_bytes(self, tenant: str) -> int:
        return min(self._share_of(tenant) or self._max_bytes, self._max_bytes)

    async def put(self, tenant: str, response_id: str, value: bytes, *, wait: bool = False) -> StoreOutcome:
        """Store a value for `ttl_s`, and replace an earlier one. The oldest other values of the tenant, then of all
        tenants, are removed until it fits; each is counted. A value that cannot fit is counted and not stored, and the
        earlier one stays: TOO_LARGE. `wait` changes nothing, since memory answers at once."""
        self._expire()
        if len(value) > self.most_bytes(tenant):
            metrics.responses_dropped.labels("too_large").inc()
            return StoreOutcome.TOO_LARGE
        self._drop((tenant, response_id))
        share = self._share_of(tenant) or self._max_bytes
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
        return StoreOutcome.KEPT

    async def put_running(self, tenant: str, response_id: str, value: bytes) -> None:
        """Do nothing, because no other router reads this memory."""

    async def mark(self, tenant: str, response_id: str, mark: bytes, *, replace: bool) -> None:
        """Do nothing, because no other router reads this memory."""

    async def get_mark(self, tenant: str, response_id: str) -> bytes | None:
        """Return None, because no other router leaves marks here."""
        return None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value. Returns whether there was one."""
        found = self._drop((tenant, response_id))
        self._tell()
        return found

    async def close(self) -> None:
        """Do nothing, because no connection is open."""

    def _expire(self) -> None:
        """Remove the values that have expired. They expire in the order in which they were stored."""
        now_s = time.monotonic()
        while self._kept:
            key, (until_s, _) = next(iter(self._kept.items()))
            if until_s > now_s:
                break
            self._drop(key)
        self._tell()

    def _drop(self, key: tuple[str, str]) -> bool:
        """Remove the value of this key (tenant and response id), and subtract its length from the sums. Returns False,
        and does nothing, if there is none."""
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
    """Stores one value per response in Redis, with a lifetime. Redis gets the writes of one response in their order. A
    read waits for the writes of its response that this router has begun."""

    shared = True

    def __init__(
        self, url: str, max_bytes: int, ttl_s: float, url_file: str = "", share_of: Callable[[str], int] = unlimited
    ) -> None:
        self._max_bytes = max_bytes
        self._share_of = share_of
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = open_redis(url, url_file, socket_timeout=2.0, socket_connect_timeout=2.0)
        self._quotas = RedisQuotas(self._redis)
        # The last write under way of each key; and the bytes that all writes under way hold.
        self._writes: dict[str, asyncio.Task[bool]] = {}
        self._writing_bytes = 0

    def most_bytes(self, tenant: str) -> int:
        return min(self._share_of(tenant) or self._max_bytes, self._max_bytes)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value, after this router's pending writes of it; None if none is stored (any more). Raises
        Unavailable if Redis does not answer."""
        await self._written(response_key(tenant, response_id))
        return await self._read(response_key(tenant, response_id))

    async def put(self, tenant: str, response_id: str, value: bytes, *, wait: bool = False) -> StoreOutcome:
        """Store a value for its lifetime. Without `wait`, the call returns after at most 40 ms, because a client waits
        for its answer; a slower write goes on, and the result is KEPT. TOO_LARGE: the value exceeds what the tenant may
        store; it is counted and not stored. NOT_NOW: pending writes leave no room, or Redis failed; the store counts
        this, and logs a failure, only without `wait`."""
        if len(value) > self.most_bytes(tenant):
            metrics.responses_dropped.labels("too_large").inc()
            return StoreOutcome.TOO_LARGE
        return await self._put(tenant, response_id, value, share=self._share_of(tenant), wait=wait)

    async def put_running(self, tenant: str, response_id: str, value: bytes) -> None:
        """Store a value as `put` does without `wait`, but neither check its size nor count it in the tenant's quota.
        The outcome is not returned; a failure is counted, and logged if it is one of Redis."""
        await self._put(tenant, response_id, value, share=0, wait=False)

    async def mark(self, tenant: str, response_id: str, mark: bytes, *, replace: bool) -> None:
        """Leave a mark, which counts in no quota and lives at least a minute. Without `replace`, an earlier mark stays.
        Raises Unavailable if Redis does not answer."""
        lifetime_ms = max(self._ttl_ms, _LEAST_MARK_MS)
        with _asking_redis():
            await self._redis.set(_mark_key(tenant, response_id), mark, px=lifetime_ms, nx=not replace)

    async def get_mark(self, tenant: str, response_id: str) -> bytes | None:
        return await self._read(_mark_key(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value, after this router's pending writes of it. Returns whether there was one. Raises Unavailable
        if Redis does not answer."""
        await self._written(response_key(tenant, response_id))
        with _asking_redis():
            if self._share_of(tenant):
                return await self._quotas.delete(tenant, response_id)
            return bool(await self._redis.delete(response_key(tenant, response_id)))

    async def close(self) -> None:
        """Give pending writes up to a second, cancel those that take longer, then close the connections."""
        if writes := set(self._writes.values()):
            _, late = await asyncio.wait(writes, timeout=_CLOSE_S)
            for write in late:
                write.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._redis.aclose()

    async def _read(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none. Raises Unavailable if Redis does not answer."""
        with _asking_redis():
            found: bytes | None = await self._redis.get(key)
        return found

    async def _put(self, tenant: str, response_id: str, value: bytes, *, share: int, wait: bool) -> StoreOutcome:
        """Start a write that follows pending writes of the same key, and wait for it; without `wait`, for 40 ms at
        most. NOT_NOW: the write failed, or pending writes hold too many bytes. Otherwise KEPT, also for a write that
        still goes on. With `wait`, the caller counts a failure. `share` is the tenant's quota in bytes, 0 for none."""
        if self._writing_bytes + len(value) > self._max_bytes:
            if not wait:
                metrics.responses_dropped.labels("no_room").inc()
            return StoreOutcome.NOT_NOW
        key = response_key(tenant, response_id)
        self._writing_bytes += len(value)
        write = asyncio.create_task(
            self._write(tenant, response_id, value, self._writes.get(key), share=share, counted=not wait)
        )
        self._writes[key] = write
        await asyncio.wait({write}, timeout=None if wait else MOST_WAIT_S)
        lost = write.cancelled() or (write.done() and not write.result())
        return StoreOutcome.NOT_NOW if lost else StoreOutcome.KEPT

    async def _write(
        self,
        tenant: str,
        response_id: str,
        value: bytes,
        before: asyncio.Task[bool] | None,
        *,
        share: int,
        counted: bool,
    ) -> bool:
        """Write a value after the write `before` of the same key; return whether Redis has it. With a quota (`share`
        bytes), the tenant's oldest responses make room. A failure of Redis is logged and counted if `counted`; it is
        never raised."""
        key = response_key(tenant, response_id)
        try:
            if before is not None:
                await asyncio.wait({before})
            if share:
                gone = await self._quotas.put(tenant, response_id, value, ttl_ms=self._ttl_ms, share_bytes=share)
                metrics.responses_dropped.labels("no_room").inc(gone)
            else:
                await self._redis.set(key, value, px=self._ttl_ms)
            note_redis("responses", answered=True)
        except (RedisError, OSError) as error:
            note_redis("responses", answered=False)
            if counted:
                metrics.responses_dropped.labels("redis").inc()
                log.warning("a response was not kept", reason=type(error).__name__)
            return False
        finally:
            self._writing_bytes -= len(value)
            if self._writes.get(key) is asyncio.current_task():
                del self._writes[key]
        return True

    async def _written(self, key: str) -> None:
        """Wait for the writes of this key that are under way."""
        if write := self._writes.get(key):
            await asyncio.wait({write})


def make_store(config: RouterConfig, share_of: Callable[[str], int] = unlimited) -> ResponseStore | None:
    """Make the configured store, in Redis or in memory. `share_of` returns the bytes of a tenant's share, 0 for no
    limit. Returns None if responses are not stored. Also returns None if several processes without Redis would each
    have their own store; the first process logs a warning."""
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


def _mark_key(tenant: str, response_id: str) -> str:
    return response_key(tenant, f"{response_id}:cancel")


@contextmanager
def _asking_redis() -> Iterator[None]:
    """Return a context for a call to Redis, which records in the metrics whether Redis answered. An error as the answer
    counts as none. Raises Unavailable if there was none."""
    try:
        yield
    except (RedisError, OSError) as error:
        note_redis("responses", answered=False)
        raise _gone() from error
    note_redis("responses", answered=True)


def _gone() -> Unavailable:
    """Make the error for a Redis that does not answer."""
    return Unavailable(
        "RESPONSE_STORE_UNAVAILABLE",
        "The store of responses does not answer.",
        "Retry; look after the router's Redis.",
        retry_after_s=1.0,
    )
