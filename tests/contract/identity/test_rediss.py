"""A Redis that speaks TLS alone, and whoever has a Redis for something: by rediss and its authority, or not at all."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_common.discovery import Endpoint, make_discovery
from quire_common.errors import Unavailable
from quire_kvstore.tiers.redis_address import RedisAddress
from quire_kvstore.tiers.redis_connection import RedisConnection, RedisConnectionLost
from quire_router.front.http.responses.store import RedisStore
from quire_router.limits.bucket import Levels
from quire_router.limits.shared_buckets import FAILURES, SharedBuckets
from quire_router.principal import KeyLimits
from tests.certificates import Authority
from tests.redis_server import RedisServer

LIMIT_S = 30.0
LIMITS = KeyLimits(60, 600)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(Authority(tmp_path).files("redis"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def wrong_urls(server: RedisServer, tmp_path: Path) -> list[str]:
    """Without an authority's word, by the word of another, by a name that the certificate has not, and without TLS."""
    stranger = Authority(tmp_path, "stranger")
    plain, _, authority = server.url.partition("?")
    return [
        plain,
        f"{plain}?ssl_ca_certs={stranger.ca}",
        f"{plain.replace('127.0.0.1', 'localhost')}?{authority}",
        plain.replace("rediss:", "redis:"),
    ]


def test_a_kvstores_pages_travel_by_tls(server: RedisServer) -> None:
    wire = RedisConnection(RedisAddress.parse(server.url), LIMIT_S)
    for size in (0, 5000, 1 << 14, (1 << 21) + 7):
        value = memoryview(bytes(index % 251 for index in range(997)) * (size // 997 + 1))[:size]
        assert wire.execute([(b"SET", b"key", value, b"EX", b"60"), (b"STRLEN", b"key")]) == [b"OK", size]
        into = memoryview(bytearray(size))
        wire.send([(b"GET", b"key")])
        assert wire.read_reply(into) == size and into == value
    wire.close()


def test_a_kvstore_says_nothing_to_who_is_not_vouched_for(server: RedisServer, wrong_urls: list[str]) -> None:
    for url in wrong_urls:
        with pytest.raises(RedisConnectionLost) as lost:
            RedisConnection(RedisAddress.parse(url), LIMIT_S)
        assert isinstance(lost.value.__cause__, ssl.SSLCertVerificationError) is url.startswith("rediss:")


async def test_services_find_each_other_by_tls(server: RedisServer) -> None:
    worker, router = (make_discovery(f"{server.url}&poll_s=0.02", {}) for _ in range(2))
    endpoint = Endpoint("a", "worker", "127.0.0.1:1")
    await worker.register(endpoint)
    async with asyncio.timeout(LIMIT_S):
        async for found in router.watch("worker"):
            if found:
                break
    assert found == [endpoint]
    await worker.close()
    await router.close()


async def test_routers_share_limits_and_responses_by_tls(server: RedisServer) -> None:
    buckets, store = SharedBuckets(server.url), RedisStore(server.url, 1 << 20, 60.0)
    admitted, levels = await buckets.admit("tenant", LIMITS, Levels(60, 600))
    assert admitted and levels.requests == pytest.approx(59, abs=0.5)
    await store.put("tenant", "id", b"value")
    assert await store.get("tenant", "id") == b"value"
    await buckets.close()
    await store.close()


async def test_a_router_says_nothing_to_who_is_not_vouched_for(server: RedisServer, wrong_urls: list[str]) -> None:
    for url in wrong_urls:
        buckets, store = SharedBuckets(url), RedisStore(url, 1 << 20, 60.0)
        with pytest.raises(FAILURES):
            await buckets.admit("tenant", LIMITS, Levels(60, 600))
        with pytest.raises(Unavailable, match="does not answer"):
            await store.get("tenant", "id")
        await buckets.close()
        await store.close()
