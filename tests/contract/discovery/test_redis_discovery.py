"""Discovery through a real Redis: arrivals, departures, death, outage, memory loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import pytest
from redis import Redis

from quire_common.discovery import Endpoint, make_discovery
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire_common.discovery import Discovery

__all__ = ["redis_server"]  # a fixture
A, B = (Endpoint(name, "worker", f"127.0.0.1:{port}", {"role": "both"}) for name, port in (("a", 1), ("b", 2)))


@contextlib.asynccontextmanager
async def found_through(server: RedisServer, ttl_s: float = 30.0) -> AsyncIterator[Discovery]:
    discovery = make_discovery(f"{server.url}?ttl_s={ttl_s}&poll_s=0.02", {})
    try:
        yield discovery
    finally:
        await discovery.close()


async def take(watch: AsyncIterator[list[Endpoint]]) -> list[Endpoint]:
    async with asyncio.timeout(60):
        return await anext(watch)


async def test_watchers_see_arrivals_changes_and_departures(redis_server: RedisServer) -> None:
    async with found_through(redis_server) as router:
        watch = router.watch("worker")
        assert await take(watch) == []
        async with found_through(redis_server) as worker:
            await worker.register(A)
            assert await take(watch) == [A]
            await worker.register(B)
            assert await take(watch) == [A, B]
            moved = Endpoint("a", "worker", "127.0.0.1:9")
            await worker.register(moved)
            assert await take(watch) == [moved, B]
        left = await take(watch)
        if left:
            left = await take(watch)  # the two went one after the other, and a poll fell between
        assert left == []


async def test_services_are_listed_apart(redis_server: RedisServer) -> None:
    async with found_through(redis_server) as both:
        await both.register(A)
        await both.register(Endpoint("k", "kvstore", "127.0.0.1:3"))
        assert await take(both.watch("worker")) == [A]
        assert [e.instance for e in await take(both.watch("kvstore"))] == ["k"]


async def test_heartbeats_outlive_the_time_to_live_and_the_dead_expire(redis_server: RedisServer) -> None:
    async with found_through(redis_server, ttl_s=3) as router:
        dead = make_discovery(f"{redis_server.url}?ttl_s=3", {})
        async with found_through(redis_server, ttl_s=3) as worker:
            await worker.register(A)
            await dead.register(B)
            watch = router.watch("worker")
            assert await take(watch) == [A, B]
            started = time.monotonic()
            for task in [t for t in asyncio.all_tasks() if t.get_name() == "heartbeat b"]:
                task.cancel()  # a process that dies says no goodbye
            assert await take(watch) == [A]
            assert time.monotonic() - started < 30
            quiet = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(4)
            assert not quiet.done(), "a's heartbeats keep it listed for longer than its time to live"
            quiet.cancel()
            with pytest.raises(asyncio.CancelledError):
                await quiet
        await dead.close()


async def test_outage_keeps_the_list_and_recovery_registers_again(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with found_through(redis_server, ttl_s=3) as worker, found_through(redis_server, ttl_s=3) as router:
            await worker.register(A)
            await worker.register(B)
            watch = router.watch("worker")
            assert await take(watch) == [A, B]
            news = asyncio.ensure_future(anext(watch))
            redis_server.stop()
            while "redis is away" not in caplog.text:
                await asyncio.sleep(0.02)
            redis_server.start()  # empty: all keys are lost
            while "redis is back" not in caplog.text:
                await asyncio.sleep(0.02)
            await asyncio.sleep(4)
            assert not news.done(), "nobody left, so nothing changed for the router"
            news.cancel()
            with pytest.raises(asyncio.CancelledError):
                await news
            assert await take(router.watch("worker")) == [A, B], "both are registered again"
    assert caplog.text.count("redis is away") == 1, "one line per outage"


async def test_starting_without_redis_waits_for_it(redis_server: RedisServer) -> None:
    redis_server.stop()
    async with found_through(redis_server, ttl_s=1) as worker, found_through(redis_server) as router:
        await worker.register(A)
        watch = router.watch("worker")
        assert await take(watch) == []
        redis_server.start()
        assert await take(watch) == [A]


async def test_close_ends_a_watch(redis_server: RedisServer) -> None:
    async with found_through(redis_server) as router:
        watch = router.watch("worker")
        await take(watch)
        waiting = asyncio.ensure_future(take(watch))
        await asyncio.sleep(0)
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_watch_ends_whenever_it_is_cancelled(redis_server: RedisServer) -> None:
    """Also at the moment at which the library hears of nothing."""
    async with found_through(redis_server) as router:
        for turns in range(60):
            watch = router.watch("worker")
            await take(watch)
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.02)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            done, _ = await asyncio.wait([waiting], timeout=20)
            assert done and waiting.cancelled(), turns


async def test_a_value_that_is_no_utf8_hides_no_other_instance(redis_server: RedisServer) -> None:
    async with found_through(redis_server) as discovery:
        await discovery.register(A)
        with Redis.from_url(redis_server.url) as redis:
            redis.sadd("quire:instances:worker", "broken", b"\x80")
            redis.set("quire:endpoint:worker:broken", b'{"address": "\x80", "metadata": 1}')
        assert await take(discovery.watch("worker")) == [A]
