"""A tenant with a share of its own of the stored responses loses its oldest ones, and nobody else's."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from quire_common.discovery.redis_client import open_redis
from quire_router.front.http.responses.store import MemoryStore, RedisStore, ResponseStore, StoreOutcome
from tests.fakes.router.router_rig import router_rig
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["redis_server"]
SHARE = 100


def share_of(tenant: str) -> int:
    return {"small": SHARE}.get(tenant, 0)


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis_server: RedisServer) -> ResponseStore:
    return store_of(redis_server if request.param == "redis" else None, 60.0)


def store_of(server: RedisServer | None, ttl_s: float) -> ResponseStore:
    return RedisStore(server.url, 1000, ttl_s, "", share_of) if server else MemoryStore(1000, ttl_s, share_of)


async def kept(store: ResponseStore, tenant: str, names: str) -> str:
    return "".join([name for name in names if await store.get(tenant, name) is not None])


async def test_a_full_share_loses_its_oldest(store: ResponseStore) -> None:
    await store.put("other", "a", bytes(300), wait=True)
    for name in "abcd":
        await store.put("small", name, bytes(40), wait=True)
    assert await kept(store, "small", "abcd") == "cd"
    await store.put("small", "e", bytes(100), wait=True)
    assert await kept(store, "small", "abcde") == "e"
    assert await store.put("small", "f", bytes(SHARE + 1), wait=True) is StoreOutcome.TOO_LARGE
    assert await kept(store, "small", "ef") == "e", "too long for the share"
    assert await kept(store, "other", "a") == "a"
    await store.close()


async def test_replaced_and_deleted_responses_leave_their_room(store: ResponseStore) -> None:
    await store.put("small", "a", bytes(20), wait=True)
    await store.put("small", "b", bytes(60), wait=True)
    await store.put("small", "b", bytes(30), wait=True)
    await store.put("small", "c", bytes(50), wait=True)
    assert await kept(store, "small", "abc") == "abc"
    await store.put("small", "a", bytes(20), wait=True)  # is the newest now
    await store.put("small", "d", bytes(30), wait=True)
    assert await kept(store, "small", "abcd") == "acd"
    assert await store.delete("small", "c") and not await store.delete("small", "c")
    await store.put("small", "e", bytes(50), wait=True)
    assert await kept(store, "small", "acde") == "ade"
    await store.close()


async def test_expired_responses_leave_their_room(redis_server: RedisServer) -> None:
    short, long = store_of(redis_server, 0.001), store_of(redis_server, 60.0)
    await long.put("small", "a", bytes(50), wait=True)
    await short.put("small", "b", bytes(50), wait=True)
    await asyncio.sleep(0.02)
    await long.put("small", "c", bytes(50), wait=True)
    assert await kept(long, "small", "abc") == "ac"
    await long.put("small", "d", bytes(50), wait=True)
    assert await kept(long, "small", "acd") == "cd"
    await short.close()
    await long.close()


@pytest.mark.parametrize("evicted", ["ends", "bytes"])
async def test_share_begins_anew_where_redis_evicted_half_of_the_account(
    redis_server: RedisServer, evicted: str
) -> None:
    store = store_of(redis_server, 60.0)
    for name in "ab":
        await store.put("small", name, bytes(40), wait=True)
    async with open_redis(redis_server.url) as redis:
        assert await redis.delete(f"quire:responses:small:{evicted}") == 1
    for name in "cdef":
        async with asyncio.timeout(10):
            await store.put("small", name, bytes(40), wait=True)
    assert (await kept(store, "small", "cdef"))[-2:] == "ef", "two fit into the share"
    assert "c" not in await kept(store, "small", "cdef")
    await store.close()


async def test_response_that_is_stored_anew_while_its_room_is_taken_stays(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router stores it right after Redis chose it to go."""
    store, other = store_of(redis_server, 60.0), store_of(redis_server, 60.0)
    await store.put("small", "a", bytes(40), wait=True)
    await store.put("small", "b", bytes(40), wait=True)
    execute: Any = Redis.execute_command
    stored_anew = False

    async def execute_then_store(redis: Redis, *command: Any, **options: Any) -> Any:
        nonlocal stored_anew
        answer = await execute(redis, *command, **options)
        if not stored_anew:
            stored_anew = True
            await other.put("small", "a", bytes(20))
        return answer

    monkeypatch.setattr(Redis, "execute_command", execute_then_store)
    await store.put("small", "c", bytes(40), wait=True)
    monkeypatch.undo()
    assert stored_anew
    assert await kept(store, "small", "ac") == "ac"
    await store.close()
    await other.close()


async def test_nothing_stays_in_redis_after_the_last_response(redis_server: RedisServer) -> None:
    store = store_of(redis_server, 60.0)
    await store.put("small", "a", bytes(50), wait=True)
    async with open_redis(redis_server.url) as redis:
        names = await redis.keys("*")
        assert len(names) == 3 and all([0 < await redis.pttl(name) <= 60_000 for name in names])
    await store.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_keys_share_comes_from_the_key_file(tmp_path: Path, redis_server: RedisServer, *, shared: bool) -> None:
    path = tmp_path / "keys.yaml"
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("small", "free")}
    path.write_text(
        f"keys:\n- {{name: small, sha256: {digests['small']}, kept_responses_mib: 1}}\n"
        f"- {{name: free, sha256: {digests['free']}}}\n"
    )
    async with router_rig(api_key_file=str(path), redis=redis_server.url if shared else "") as rig:
        text = {f"m{number}": "x" * 512 for number in range(16)}
        body = {"input": "a", "max_output_tokens": 1, "metadata": text}
        for key, first_status in (("small", 404), ("free", 200)):
            rig.http.headers.update({"Authorization": f"Bearer {key}"})
            made = [(await rig.http.post("/v1/responses", json=body)).json()["id"] for _ in range(130)]
            statuses = [(await rig.http.get(f"/v1/responses/{made[at]}")).status_code for at in (0, -1)]
            assert statuses == [first_status, 200]
