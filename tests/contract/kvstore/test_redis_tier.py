"""The Redis tier, on a real one: pages are shared through it, and its absence costs nothing but its pages."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from quire_common.errors import ConfigError
from quire_kvstore.tiers.redis_address import redis_address
from quire_kvstore.tiers.redis_backend import PREFIX, redis_key
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer, redis_server
from tests.unit.kvstore.pages import FRAMED_BYTES, chain, framed, length, part, put
from tests.unit.kvstore.tiers import eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quire_kvstore.page_store import PageStore

__all__ = ["redis_server"]
A, B = chain("a", 8), chain("b", 8)


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Any]:
    with Redis.from_url(redis_server.url) as client:
        yield client


def ready(store: PageStore) -> None:
    eventually(lambda: tier(store, "redis").available)


def share(store: PageStore) -> None:
    """A in Redis, and in memory no more."""
    ready(store)
    assert put(store, A) == (8, 0)
    store.flush(30)
    assert tier(store, "redis").figures.stored == 8
    forget_memory(store)


def test_pages_are_shared_between_stores(redis_server: RedisServer, redis: Any) -> None:
    with tiered(redis_url=redis_server.url) as first, tiered(redis_url=redis_server.url, redis_ttl_s=1000) as second:
        share(first)
        ready(second)
        assert not first.watched and not second.watched, "neither tells of what the other has put there"
        assert sorted(redis.keys()) == sorted(map(redis_key, A.keys()))
        assert redis.get(redis_key(A.key(3))) == framed(A, 3)
        assert redis_key(A.key(0)).startswith(PREFIX) and 86_000 < redis.ttl(redis_key(A.key(0))) <= 86_400
        assert length(second, A) == 0, "looking without a lease asks nobody"
        assert found(second, A) == (8, "redis")
        assert found(second, A) == (8, "ram")
        assert found(second, B) == (0, "")
        figures = tier(second, "redis").figures
        assert (figures.hits, figures.misses, figures.bytes_read) == (8, 8, 8 * FRAMED_BYTES)
        assert put(second, part(A, 0, 8)) == (0, 0)
        forget_memory(second)
        assert put(second, A) == (8, 0), "who cannot know wants them"
        second.flush(30)
        assert tier(second, "redis").figures.stored == 0, "but does not send what is there"
        assert redis.ttl(redis_key(A.key(0))) <= 1000, "it only lives on"


def test_watchers_hear_of_pages_that_came_from_redis(redis_server: RedisServer) -> None:
    with tiered(redis_url=redis_server.url) as store:
        share(store)
        watcher = store.open_watch()
        assert store.snapshot(watcher)[1] == {"ram": []}
        assert found(store, part(A, 0, 3)) == (3, "redis")
        changes = watcher.wait_for_changes() or []
        assert {key for change in changes for key in change.stored} == set(part(A, 0, 3).keys())
        parents = {change.stored[0]: change.parents[0] for change in changes}
        assert parents[A.key(2)] == A.hashes[1]
        store.close_watch(watcher)


@pytest.mark.parametrize("name", ["flipped", "cut", "another page", "another type", "enormous"])
def test_damaged_redis_value_is_a_miss_and_is_deleted(redis_server: RedisServer, redis: Any, name: str) -> None:
    with tiered(redis_url=redis_server.url, max_page_bytes=4096) as store:
        share(store)
        key = redis_key(A.key(3))
        redis.delete(key)
        if name == "another type":
            redis.rpush(key, "a list")
        else:
            page = framed(A, 3)
            wrong = {"flipped": page[:-1] + b"\0", "cut": page[:-1], "another page": framed(B, 3), "enormous": page * 9}
            redis.set(key, wrong[name])
        assert found(store, A) == (3, "redis")
        assert tier(store, "redis").figures.corrupt == 1
        eventually(lambda: not redis.exists(key))
        assert put(store, A)[1] == 0 and length(store, A) == 8
        store.flush(30)
        assert redis.get(key) == framed(A, 3)
        assert tier(store, "redis").available, "one bad value says nothing of the others"


def test_an_expired_page_is_a_miss(redis_server: RedisServer, redis: Any) -> None:
    with tiered(redis_url=redis_server.url) as store:
        share(store)
        redis.pexpire(redis_key(A.key(5)), 1)
        eventually(lambda: not redis.exists(redis_key(A.key(5))))
        assert found(store, A) == (5, "redis")


def test_empty_redis_after_a_restart_is_refilled(redis_server: RedisServer) -> None:
    with tiered(pages=16, redis_url=redis_server.url) as store:
        share(store)
        redis_server.stop()
        started = time.monotonic()
        assert found(store, A) == (0, "")
        assert put(store, B) == (8, 0) and found(store, B) == (8, "ram")
        assert time.monotonic() - started < 10
        eventually(lambda: not tier(store, "redis").available)
        store.flush(30)
        assert tier(store, "redis").figures.dropped >= 1
        redis_server.start()
        ready(store)
        assert found(store, A) == (0, ""), "its memory was lost"
        assert put(store, A) == (8, 0)
        store.flush(30)
        forget_memory(store)
        assert found(store, A) == (8, "redis")


def test_missing_redis_is_a_miss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tiered(redis_url=f"redis://127.0.0.1:{port}/0") as store:
        assert put(store, A) == (8, 0) and found(store, A) == (8, "ram") and found(store, B) == (0, "")
        eventually(lambda: tier(store, "redis").figures.errors >= 2)
        assert not tier(store, "redis").available


@pytest.mark.parametrize("mode", ["silent", "slow", "garbage"])
def test_hanging_or_broken_redis_delays_no_caller(redis_server: RedisServer, mode: str) -> None:
    with (
        RedisProxy(redis_server.port) as proxy,
        tiered(pages=32, redis_url=proxy.url, redis_timeout_ms=400, redis_retry_s=0.2) as store,
    ):
        share(store)
        proxy.mode = mode
        assert put(store, B) == (8, 0)
        started = time.monotonic()
        assert found(store, A, wait_s=0.1) == (0, ""), "the deadline is the lookup's own"
        assert found(store, B) == (8, "ram")
        eventually(lambda: not tier(store, "redis").available)
        assert found(store, A, wait_s=40) == (0, ""), "an open breaker is not waited for"
        assert time.monotonic() - started < 40
        assert tier(store, "redis").figures.errors >= 1
        proxy.mode = "pass"
        ready(store)
        assert found(store, A) == (8, "redis")


def test_a_redis_that_refuses_writes_is_still_read(redis_server: RedisServer, redis: Any) -> None:
    with tiered(pages=16, redis_url=redis_server.url) as store:
        share(store)
        redis.config_set("maxmemory", "1mb")
        assert put(store, B) == (8, 0)
        store.flush(30)
        figures = tier(store, "redis").figures
        assert (figures.stored, figures.dropped, figures.errors) == (8, 8, 8)
        assert found(store, A) == (8, "redis")
        assert tier(store, "redis").available


def test_redis_pages_reach_the_disk_on_their_way_up(redis_server: RedisServer, tmp_path: Path) -> None:
    with tiered(redis_url=redis_server.url) as first:
        share(first)
    with tiered(redis_url=redis_server.url, disk=tmp_path) as store:
        ready(store)
        assert found(store, A) == (8, "redis")
        store.flush(30)
        assert tier(store, "disk").figures.stored == 8
        redis_server.stop()
        forget_memory(store)
        assert found(store, A) == (8, "disk")


def test_a_page_that_is_damaged_on_the_disk_comes_from_redis(redis_server: RedisServer, tmp_path: Path) -> None:
    with tiered(redis_url=redis_server.url, disk=tmp_path) as store:
        share(store)
        for file in list(tmp_path.rglob("*.page"))[:3]:
            file.write_bytes(b"\0" * 4096)
        assert found(store, A) == (8, "redis")
        disk, redis_tier = tier(store, "disk").figures, tier(store, "redis").figures
        assert (disk.hits, disk.misses, disk.corrupt) == (5, 3, 3)
        assert (redis_tier.hits, redis_tier.misses) == (3, 0)
        store.flush(30)
        assert tier(store, "disk").pages == 8, "and is written anew"


def test_bad_redis_url_is_refused_with_a_fix() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        redis_address("memcached://somewhere")
