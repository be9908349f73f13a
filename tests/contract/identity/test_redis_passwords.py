"""The password of a Redis changes, in Redis and in the file that services have it from. No service is started again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from quire_common.discovery import Endpoint, make_discovery
from quire_common.errors import QuireError
from quire_kvstore.tiers.redis_address import redis_address
from quire_kvstore.tiers.redis_connection import RedisConnection, RedisConnectionLost
from quire_router.front.http.responses.store import RedisStore
from quire_router.limits.bucket import Levels
from quire_router.limits.shared_buckets import FAILURES, SharedBuckets
from quire_router.principal import KeyLimits
from tests.certificates import replace
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
LIMIT_S = 30.0
LIMITS = KeyLimits(60_000, 600)


async def until_it_works(ask: Callable[[], Awaitable[bool]]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(*FAILURES, QuireError, RedisConnectionLost):
            if await ask():
                return True
        await asyncio.sleep(0.1)
    return False


async def test_users_of_redis_follow_the_file_of_its_url(redis_server: RedisServer, tmp_path: Path) -> None:
    plain = redis_server.url
    admin: Any = Redis.from_url(plain)
    await admin.acl_setuser("quire", enabled=True, passwords=["+one"], keys=["*"], channels=["*"], categories=["+@all"])
    file = tmp_path / "redis.url"

    def url(password: str) -> str:
        return plain.replace("redis://", f"redis://quire:{password}@")

    file.write_text(url("one") + "\n")
    buckets = SharedBuckets(url("one"), str(file))
    store = RedisStore(url("one"), 1 << 20, 60.0, str(file))
    spec = f"{url('one')}?poll_s=0.05"
    discovery = make_discovery(spec, {}, str(file))
    kvstore = redis_address(url("one"), str(file))

    async def admit() -> bool:
        return (await buckets.admit("tenant", LIMITS, Levels(60_000, 600)))[0]

    async def keep() -> bool:
        await store.put("tenant", "id", b"value")
        return await store.get("tenant", "id") == b"value"

    async def register() -> bool:
        await discovery.register(Endpoint("a", "worker", "127.0.0.1:1"))
        return bool(await admin.delete("quire:endpoint:worker:a"))

    async def dial() -> bool:
        RedisConnection(kvstore(), LIMIT_S).close()
        return True

    for ask in (admit, keep, register, dial):
        assert await ask()
    # Another password alone: who still logs in with the old one is refused.
    await admin.acl_setuser("quire", enabled=True, passwords=["-one", "+two"])
    await admin.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(FAILURES):
        for _ in range(2):  # the first may only meet the end of its connection
            with contextlib.suppress(ConnectionError):
                await admit()
    with pytest.raises(RedisConnectionLost):
        await dial()
    replace(file, url("two").encode())
    for ask in (admit, keep, register, dial):
        assert await until_it_works(ask)
    for opened in (buckets, store, discovery):
        await opened.close()
    await admin.aclose()
