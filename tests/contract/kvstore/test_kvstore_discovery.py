"""A kvstore is found through Redis for as long as it serves, as the services with an event loop are."""

from __future__ import annotations

import asyncio

import pytest

from quire_common.discovery import Endpoint, make_discovery
from tests.contract.kvstore.kvstore_process import KvstoreProcess
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
LIMIT_S = 20.0


async def listed(spec: str, count: int) -> list[Endpoint]:
    """The kvstores that discovery tells of, once there are so many."""
    discovery = make_discovery(spec, {})
    try:
        async with asyncio.timeout(LIMIT_S):
            async for endpoints in discovery.watch("kvstore"):
                if len(endpoints) == count:
                    return endpoints
    finally:
        await discovery.close()
    raise AssertionError("the watch has ended")


async def test_kvstore_registers_in_redis_until_it_leaves(redis_server: RedisServer) -> None:
    spec = f"{redis_server.url}?ttl_s=30&poll_s=0.05"
    process = KvstoreProcess("--discovery", spec, "--advertise", "127.0.0.1:4321", "--instance", "kvstore-1")
    process.wait_ready()
    assert await listed(spec, 1) == [Endpoint("kvstore-1", "kvstore", "127.0.0.1:4321")]
    assert process.stop() == 0
    # Long before the entry's time to live has passed.
    assert await listed(spec, 0) == []


async def test_kvstore_on_every_address_must_say_where_it_is_reached(redis_server: RedisServer) -> None:
    process = KvstoreProcess("--discovery", redis_server.url, "--listen", "0.0.0.0:0", "--insecure")
    with pytest.raises(AssertionError, match="ADVERTISE_MISSING"):
        process.wait_ready()
    process.kill()
