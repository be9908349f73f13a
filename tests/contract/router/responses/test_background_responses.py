"""Responses in the background against a full share, a slow Redis and the end of their router: each one ends, can always
be withdrawn, and holds its places only while it is generated."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from quire_router.front.http.responses import background
from quire_router.front.http.responses.store import MemoryStore, RedisStore, StoreOutcome
from tests.contract.router.responses.test_router_responses import create, ended, until_settled
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
SHARE_MIB = 1
# The response object repeats these several kilobytes.
METADATA = {f"m{number}": "x" * 512 for number in range(16)}


@contextlib.asynccontextmanager
async def limited_rig(tmp_path: Path, redis: str, **config: Any) -> AsyncIterator[RouterRig]:
    """A router whose client's key has a small share of the stored responses."""
    digest = hashlib.sha256(b"small").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{name: small, sha256: {digest}, kept_responses_mib: {SHARE_MIB}}}\n")
    scheduler = FakeScheduler(max_model_len=3 << 20)
    async with router_rig([scheduler], api_key_file=str(path), redis=redis, **config) as rig:
        rig.http.headers["Authorization"] = "Bearer small"
        yield rig


async def fill_share(rig: RouterRig) -> None:
    """Store so many responses that the oldest ones have no room any more."""
    fields: dict[str, Any] = {"max_output_tokens": 1, "instructions": "x" * (SHARE_MIB << 18)}
    made = [(await create(rig, **fields)).json()["id"] for _ in range(5)]
    assert (await rig.http.get(f"/v1/responses/{made[0]}")).status_code == 404


@pytest.mark.parametrize("shared", [False, True])
async def test_response_that_outgrows_its_share_ends_as_failed(
    tmp_path: Path, redis_server: RedisServer, *, shared: bool
) -> None:
    async with limited_rig(tmp_path, redis_server.url if shared else "") as rig:
        told = (await create(rig, "x" * (SHARE_MIB << 20), background=True, metadata=METADATA)).json()
        assert told["status"] == "in_progress"
        failed = await ended(rig, told["id"])
        assert failed["status"] == "failed" and failed["output"] == [] and failed["metadata"] == METADATA
        assert failed["error"]["message"].startswith("RESPONSE_TOO_LARGE")
        assert "1048576 bytes" in failed["error"]["message"]


@pytest.mark.parametrize("shared", [False, True])
async def test_failed_response_that_has_no_room_for_its_error_ends_without_what_was_sent(
    tmp_path: Path, redis_server: RedisServer, *, shared: bool
) -> None:
    async with limited_rig(tmp_path, redis_server.url if shared else "") as rig:
        rig.scheduler.gate.clear()
        empty = (await create(rig, background=True, instructions="")).json()
        room = (SHARE_MIB << 20) - len(orjson.dumps({"response": empty, "messages": []}))
        told = (await create(rig, background=True, instructions="x" * room)).json()
        assert told["status"] == "in_progress"
        async with asyncio.timeout(60):
            while len(rig.scheduler.running) < 2:
                await asyncio.sleep(0.01)
        rig.scheduler.fail_all("BROKEN", grpc.StatusCode.INVALID_ARGUMENT)
        failed = await ended(rig, told["id"])
        assert failed["status"] == "failed" and failed["instructions"] is None
        assert failed["error"]["message"].startswith("BROKEN")


async def test_response_that_is_too_large_in_every_form_leaves_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(store: MemoryStore, *_: object, **__: object) -> StoreOutcome:
        return StoreOutcome.TOO_LARGE

    monkeypatch.setattr(MemoryStore, "put", full)
    async with router_rig() as rig:
        assert (await create(rig, background=True)).status_code == 200
        await until_settled(rig)
    said = [record.levelname for record in caplog.records if "was not kept: it is too large" in record.getMessage()]
    assert said == ["WARNING"]


@pytest.mark.parametrize("shared", [False, True])
async def test_response_that_can_never_be_kept_is_refused_as_it_starts(
    tmp_path: Path, redis_server: RedisServer, *, shared: bool
) -> None:
    async with limited_rig(tmp_path, redis_server.url if shared else "") as rig:
        refused = await create(rig, background=True, instructions="x" * (SHARE_MIB << 20))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "RESPONSE_TOO_LARGE")
        assert rig.router.admission.inside == 0 and not rig.router.background_runs


@pytest.mark.parametrize("way", ["cancel", "delete"])
@pytest.mark.parametrize("where", ["memory", "redis", "another router"])
async def test_running_response_can_be_withdrawn_while_the_share_is_full(
    tmp_path: Path, redis_server: RedisServer, where: str, way: str
) -> None:
    url = "" if where == "memory" else redis_server.url
    async with limited_rig(tmp_path, url) as rig, limited_rig(tmp_path, url) as other:
        told = (await create(rig, background=True, max_output_tokens=1 << 20)).json()
        await fill_share(rig)
        asked, path = other if where == "another router" else rig, f"/v1/responses/{told['id']}"
        assert (await asked.http.get(path)).json()["status"] == "in_progress"
        answer = await (asked.http.delete(path) if way == "delete" else asked.http.post(f"{path}/cancel"))
        assert answer.status_code == 200, answer.text
        await until_settled(rig)
        last = await asked.http.get(path)
        assert last.status_code == 404 if way == "delete" else last.json()["status"] == "cancelled"
        async with asyncio.timeout(30):  # the router's message may arrive after the response has settled
            while not rig.scheduler.aborts:
                await asyncio.sleep(0.01)


async def test_mark_of_a_withdrawn_response_is_left_however_little_room_there_is(redis_server: RedisServer) -> None:
    small, reader = RedisStore(redis_server.url, 4, 0.001), RedisStore(redis_server.url, 4, 60.0)
    await small.mark("t", "a", b"RESPONSE_CANCELLED", replace=False)
    await small.mark("t", "a", b"another", replace=False)
    await asyncio.sleep(0.01)
    assert await reader.get_mark("t", "a") == b"RESPONSE_CANCELLED", "it outlives what is kept for a millisecond"
    await small.mark("t", "a", b"another", replace=True)
    assert await reader.get_mark("t", "a") == b"another" and await reader.get("t", "a") is None
    await asyncio.gather(small.close(), reader.close())


async def test_cancellation_at_a_router_that_cannot_pass_it_on_is_an_error(redis_server: RedisServer) -> None:
    async with router_rig(redis=redis_server.url) as first, router_rig(redis=redis_server.url) as second:
        first.scheduler.gate.clear()
        told = (await create(first, background=True)).json()
        redis_server.stop()
        lost = await second.http.post(f"/v1/responses/{told['id']}/cancel")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "RESPONSE_STORE_UNAVAILABLE")
        here = await first.http.post(f"/v1/responses/{told['id']}/cancel")
        assert here.json()["status"] == "cancelled", "where it runs, it needs no store"
        await asyncio.wait_for(first.scheduler.aborted.wait(), 60)


async def test_ended_response_holds_no_place_while_the_store_is_asked(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()

    async def hang(store: RedisStore, *_: object) -> None:
        await go.wait()

    monkeypatch.setattr(RedisStore, "get_mark", hang)
    async with router_rig(redis=redis_server.url, max_concurrent_requests=1) as rig:
        for _ in range(3):
            told = (await create(rig, background=True)).json()
            async with asyncio.timeout(60):
                while rig.router.admission.inside:
                    await asyncio.sleep(0.01)
        assert rig.router.background_runs == 3
        go.set()
        assert (await ended(rig, told["id"]))["status"] == "incomplete"


async def test_response_that_starts_without_redis_is_known_elsewhere_at_its_end(redis_server: RedisServer) -> None:
    async with router_rig(redis=redis_server.url) as rig, router_rig(redis=redis_server.url) as other:
        rig.scheduler.gate.clear()
        redis_server.stop()
        told = await create(rig, background=True)
        assert told.status_code == 200
        path = f"/v1/responses/{told.json()['id']}"
        assert (await rig.http.get(path)).json()["status"] == "in_progress"
        redis_server.start()
        assert (await other.http.get(path)).status_code == 404
        rig.scheduler.gate.set()
        await until_settled(rig)
        assert (await other.http.get(path)).json()["status"] == "incomplete"


@pytest.mark.parametrize("way", ["", "cancel", "delete"])
async def test_end_of_a_response_reaches_a_redis_that_was_away(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(background, "_RETRY_S", 0.05)
    async with router_rig(redis=redis_server.url) as rig, router_rig(redis=redis_server.url) as other:
        rig.scheduler.gate.clear()
        told = (await create(rig, background=True)).json()
        path = f"/v1/responses/{told['id']}"
        redis_server.stop()
        rig.scheduler.gate.set()
        async with asyncio.timeout(60):
            while rig.router.admission.inside:
                await asyncio.sleep(0.01)
        if way == "cancel":
            assert (await rig.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        elif way == "delete":
            await rig.http.delete(path)
        assert rig.router.background_runs == 1
        redis_server.start()
        await until_settled(rig)
        last = await other.http.get(path)
        if way == "delete":
            assert last.status_code == 404
        else:
            assert last.json()["status"] == ("cancelled" if way else "incomplete")


async def test_no_response_is_sent_again_to_a_store_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_S", 0.01)
    monkeypatch.setattr(background, "_RETRY_FOR_S", 0.1)

    async def full(store: MemoryStore, *_: object, **__: object) -> StoreOutcome:
        return StoreOutcome.NOT_NOW

    monkeypatch.setattr(MemoryStore, "put", full)
    async with router_rig() as rig:
        told = (await create(rig, background=True)).json()
        await until_settled(rig)
        assert (await rig.http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def test_running_response_fails_if_its_router_is_stopped(redis_server: RedisServer) -> None:
    async with router_rig(redis=redis_server.url) as other:
        async with router_rig(redis=redis_server.url) as rig:
            rig.scheduler.gate.clear()
            told = (await create(rig, background=True)).json()
        failed = (await other.http.get(f"/v1/responses/{told['id']}")).json()
        assert failed["status"] == "failed" and failed["error"]["message"].startswith("ROUTER_STOPPED")
