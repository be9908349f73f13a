"""Limits of sequences in progress per key: over all routers of a Redis, of one router where Redis is away."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import inference_pb2 as ib
from quire_common.errors import InvalidArgument, Overloaded
from quire_router.limits.concurrency import ConcurrencyLimits
from quire_router.limits.shared_concurrency import TIMEOUT_S, SharedConcurrency
from tests.fakes.router.router_rig import router_rig
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
LEASE_S = 1.0


# A busy machine answers late, too.
PATIENT_S = 10.0


def router_of(
    server: RedisServer | RedisProxy, lease_s: float = LEASE_S, timeout_s: float = PATIENT_S
) -> ConcurrencyLimits:
    return ConcurrencyLimits(SharedConcurrency(server.url, lease_s=lease_s, timeout_s=timeout_s))


async def fill(limits: ConcurrencyLimits, limit: int, tenant: str = "t") -> int:
    """Take places one by one until one is refused; return how many were taken."""
    taken = 0
    while True:
        try:
            await limits.enter(tenant, limit, 1)
        except Overloaded:
            return taken
        taken += 1


async def until_free(limits: ConcurrencyLimits, limit: int) -> None:
    """Wait until a place is free, and take it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await limits.enter("t", limit, 1)
        except Overloaded:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_one_router_counts_each_tenant_alone() -> None:
    limits = ConcurrencyLimits()
    assert await fill(limits, 3) == 3
    assert await fill(limits, 2, "other") == 2
    limits.leave("t", 3, 2)
    with pytest.raises(Overloaded, match="1 of 3 sequences in progress") as caught:
        await limits.enter("t", 3, 3)
    assert caught.value.code == "TOO_MANY_CONCURRENT" and caught.value.retry_after_s >= 1
    await limits.enter("t", 3, 2)
    with pytest.raises(InvalidArgument, match="4 sequences; this API key may run 3"):
        await limits.enter("t", 3, 4)
    await limits.enter("unlimited", 0, 10**9)
    limits.leave("unlimited", 0, 10**9)
    await limits.close()


async def test_routers_that_share_a_redis_share_the_limit(redis_server: RedisServer) -> None:
    one, other = router_of(redis_server, lease_s=600.0), router_of(redis_server, lease_s=600.0)
    entered = await asyncio.gather(*(fill(router, 7) for router in (one, other) for _ in range(8)))
    assert sum(entered) == 7
    one_has = sum(entered[:8])
    one.leave("t", 7, one_has)
    for _ in range(one_has):
        await until_free(other, 7)
    assert await fill(one, 7) == 0
    assert await fill(one, 7, "another tenant") == 7
    one.leave("another tenant", 7, 7)
    other.leave("t", 7, 7)
    await asyncio.gather(one.close(), other.close())


async def test_leases_are_renewed_while_sequences_run_and_expire_when_their_router_is_dead(
    redis_server: RedisServer,
) -> None:
    one, other, busy = router_of(redis_server), router_of(redis_server), router_of(redis_server)
    await busy.enter("t", 5, 1)
    assert await fill(one, 5) == 4
    until = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        assert await fill(other, 5) == 0, "the leases are renewed"
        await asyncio.sleep(0.1)
    await one.close()  # holds its places, and renews them no more: dead
    died = time.monotonic()
    await until_free(other, 5)
    assert time.monotonic() - died < 2 * LEASE_S
    assert await fill(other, 5) == 3, "the others' leases go on"
    other.leave("t", 5, 4)
    busy.leave("t", 5, 1)
    await asyncio.gather(other.close(), busy.close())


class GatedConcurrency(SharedConcurrency):
    """Redis decides at once; its answers wait for the gate."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lease_s=60.0, timeout_s=PATIENT_S)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def hold(self, tenant: str, places: int, asking: Sequence[tuple[int, int]] = ()) -> Any:
        answer = await super().hold(tenant, places, asking)
        self.asked.set()
        await self.gate.wait()
        return answer


async def test_requests_that_are_cancelled_while_redis_answers_leave_no_place_behind(redis_server: RedisServer) -> None:
    shared = GatedConcurrency(redis_server.url)
    one, other = ConcurrencyLimits(shared), router_of(redis_server)
    asked = asyncio.create_task(one.enter("t", 2, 1))
    await shared.asked.wait()
    waiting = asyncio.create_task(one.enter("t", 2, 1))
    await asyncio.sleep(0)
    for entering in (asked, waiting):
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        assert entering.cancelled()
    assert await fill(other, 2) == 1, "Redis has admitted one of them"
    shared.gate.set()
    await until_free(other, 2)
    assert await fill(one, 2) == 0
    other.leave("t", 2, 2)
    await asyncio.gather(one.close(), other.close())


async def test_a_request_that_is_cancelled_as_redis_admits_it_leaves_no_place_behind(
    redis_server: RedisServer,
) -> None:
    limits = router_of(redis_server, lease_s=60.0)
    entering = asyncio.create_task(limits.enter("t", 1, 1))
    await asyncio.sleep(0)
    places = limits.places("t")
    while not places.held:
        await asyncio.sleep(0)
    entering.cancel()  # its place is held, and it has not woken up yet
    await asyncio.gather(entering, return_exceptions=True)
    assert entering.cancelled() and places.held == places.asked == 0
    await until_free(limits, 1)
    limits.leave("t", 1, 1)
    await limits.close()


async def test_a_slow_redis_does_not_admit_the_requests_of_a_tenant_one_by_one(redis_server: RedisServer) -> None:
    with RedisProxy(redis_server.port) as proxy:
        limits, other = router_of(proxy, 60.0), router_of(redis_server)
        assert await fill(other, 5) == 5
        await limits.enter("t", 25, 1)
        proxy.set_mode("slow", 0.15)
        took: list[float] = []

        async def enter(places: int) -> bool:
            began = time.monotonic()
            try:
                await limits.enter("t", 25, places)
            except Overloaded:
                return False
            finally:
                took.append(time.monotonic() - began)
            return True

        first = asyncio.create_task(enter(1))
        await asyncio.sleep(0.05)
        # While that call is under way, more requests come than there is room for.
        entered = await asyncio.gather(*(enter(places) for places in [2] * 8 + [3] + [1] * 3))
        assert await first and entered == [True] * 8 + [False] + [True] * 2 + [False]
        assert 0.1 < max(took) < 1.0, "a request waits for two answers at most"
        assert await fill(other, 25) == 0
        limits.leave("t", 25, 20)
        other.leave("t", 25, 5)
        await asyncio.gather(limits.close(), other.close())


async def test_routers_never_hold_more_than_the_limit_together_however_requests_end(
    redis_server: RedisServer,
) -> None:
    """Requests of several weights come, are cancelled at any moment and end, over routers with slow and fast ways to
    Redis; in the end every place is free."""
    limit, chance, held = 9, random.Random(7), 0

    async def request(router: ConcurrencyLimits) -> None:
        nonlocal held
        places = chance.randint(1, 3)
        await asyncio.sleep(chance.random() * 0.5)
        try:
            async with asyncio.timeout(chance.choice((0.004, 0.02, 5.0))):
                await router.enter("t", limit, places)
        except (TimeoutError, Overloaded):
            return
        held += places
        assert held <= limit
        await asyncio.sleep(chance.random() * 0.02)
        held -= places
        router.leave("t", limit, places)

    with RedisProxy(redis_server.port) as proxy:
        proxy.set_mode("slow", 0.01)
        routers = [router_of(proxy, 60.0) for _ in range(2)]
        routers.append(router_of(redis_server, lease_s=60.0))
        await asyncio.gather(*(request(router) for router in routers for _ in range(100)))
        for router in routers:
            places = router.places("t")
            assert places.held == places.asked == 0
        for _ in range(limit):
            await until_free(routers[-1], limit)
        routers[-1].leave("t", limit, limit)
        await asyncio.gather(*(router.close() for router in routers))


async def test_a_lease_is_renewed_further_after_a_renewal_has_failed_by_a_bug(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedConcurrency(redis_server.url, lease_s=3.0, timeout_s=PATIENT_S)
    limits, other, hold, bugs = ConcurrencyLimits(shared), router_of(redis_server), shared.hold, list[str]()

    async def sometimes_wrong(*given: Any) -> Any:
        if bugs:
            raise ValueError(bugs.pop())
        return await hold(*given)

    monkeypatch.setattr(shared, "hold", sometimes_wrong)
    await limits.enter("t", 3, 2)
    bugs.append("a bug")
    async with asyncio.timeout(30):
        while bugs:
            await asyncio.sleep(0.05)
    await asyncio.sleep(3.5)  # the lease that was held then is over
    assert await fill(other, 3) == 1
    limits.leave("t", 3, 2)
    other.leave("t", 3, 1)
    await asyncio.gather(limits.close(), other.close())


async def test_requests_that_wait_as_the_limits_are_closed_are_not_forgotten(redis_server: RedisServer) -> None:
    limits = router_of(redis_server, timeout_s=60.0)
    redis_server.freeze()
    entering = asyncio.create_task(limits.enter("t", 3, 1))
    await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(limits.close(), entering), 30)
    redis_server.thaw()


async def test_requests_that_wait_for_redis_count_too(redis_server: RedisServer) -> None:
    limits = router_of(redis_server, timeout_s=TIMEOUT_S)
    redis_server.freeze()
    began = time.monotonic()
    entered = await asyncio.gather(*(limits.enter("t", 3, 1) for _ in range(50)), return_exceptions=True)
    assert [type(outcome) for outcome in entered] == [type(None)] * 3 + [Overloaded] * 47
    assert time.monotonic() - began < 2
    redis_server.thaw()
    limits.leave("t", 3, 3)
    await limits.close()


@pytest.mark.parametrize("frozen", [True, False])
async def test_without_redis_each_router_counts_alone_and_redis_learns_it_afterwards(
    redis_server: RedisServer, *, frozen: bool
) -> None:
    one, other = (router_of(redis_server, timeout_s=TIMEOUT_S) for _ in range(2))
    assert await fill(one, 2) == 2
    assert await fill(other, 3) == 1
    if frozen:
        redis_server.freeze()
    else:
        redis_server.stop()
    for router, free in ((one, 3), (other, 4)):
        began = time.monotonic()
        assert await fill(router, 5) == free, "an error for a Redis that is away, or a place too many"
        assert time.monotonic() - began < 5
    one.leave("t", 5, 3)
    if frozen:
        redis_server.thaw()
    else:
        redis_server.start()  # with an empty memory
    newest = router_of(redis_server)
    deadline = time.monotonic() + 30
    while (free := await fill(newest, 9)) != 2:  # 2 and 5 are held
        newest.leave("t", 9, free)
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    newest.leave("t", 9, 2)
    one.leave("t", 5, 2)
    other.leave("t", 5, 5)
    await asyncio.gather(one.close(), other.close(), newest.close())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key_file(path: Path, limits: str) -> str:
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("limited", "free")}
    path.write_text(
        f"keys:\n- {{name: limited, sha256: {digests['limited']}, {limits}}}\n"
        f"- {{name: free, sha256: {digests['free']}}}\n"
    )
    return str(path)


async def test_a_key_runs_as_many_sequences_as_its_limit_over_http_and_grpc(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.yaml", "max_concurrent: 2")
    async with router_rig(api_key_file=keys, metrics_on_main=True) as rig:
        rig.http.headers.update(bearer("limited"))
        rig.scheduler.gate.clear()
        running = asyncio.create_task(rig.complete("a", max_tokens=1, n=2))
        while len(rig.scheduler.submits) < 2:
            await asyncio.sleep(0.01)
        refused = await rig.complete("a", max_tokens=1)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "TOO_MANY_CONCURRENT"
        assert int(refused.headers["retry-after"]) >= 1
        beams = {"use_beam_search": True, "n": 2, "max_tokens": 1}
        assert (await rig.complete("a", **beams)).status_code == 429
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.inference.Generate(
                ib.GenerateRequest(text="a", max_tokens=1), metadata=(("authorization", "Bearer limited"),)
            ):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await rig.complete("a", max_tokens=1, n=3)).status_code == 400
        shed = 'quire_router_shed_total{reason="TOO_MANY_CONCURRENT",tenant="limited"} 3.0'
        assert shed in (await rig.http.get("/metrics")).text, "over HTTP, by a beam search, over gRPC"
        rig.scheduler.gate.set()
        rig.http.headers.update(bearer("free"))
        assert (await rig.complete("a", max_tokens=1, n=3)).status_code == 200
        rig.http.headers.update(bearer("limited"))
        assert (await running).status_code == 200
        assert (await rig.complete("a", max_tokens=1, n=2)).status_code == 200, "all places came back"
        assert (await rig.complete("", max_tokens=-1)).status_code == 400
        assert (await rig.complete("a", max_tokens=1, n=2)).status_code == 200, "a bad request holds none"


async def test_a_request_that_a_full_router_refuses_takes_no_place_of_its_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.yaml", "max_concurrent: 2")
    async with router_rig(api_key_file=keys, max_concurrent_requests=1, metrics_on_main=True) as rig:
        rig.http.headers.update(bearer("limited"))
        rig.scheduler.gate.clear()
        running = asyncio.create_task(rig.complete("a", max_tokens=1))
        while not rig.scheduler.submits:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert (await rig.complete("a", max_tokens=1)).json()["error"]["code"] == "TOO_MANY_REQUESTS"
        shed = 'quire_router_shed_total{reason="TOO_MANY_REQUESTS",tenant="limited"} 3.0'
        assert shed in (await rig.http.get("/metrics")).text
        rig.scheduler.gate.set()
        assert (await running).status_code == 200


async def test_a_key_claims_no_priority_above_its_highest(tmp_path: Path) -> None:
    async with router_rig(api_key_file=key_file(tmp_path / "keys.yaml", "highest_priority: 5")) as rig:
        for key, asked in (("limited", 1), ("limited", 7), ("limited", None), ("free", -3)):
            rig.http.headers.update(bearer(key))
            given = {} if asked is None else {"priority": asked}
            assert (await rig.complete("a", max_tokens=1, **given)).status_code == 200
        request = ib.GenerateRequest(text="a", max_tokens=1, priority=-9)
        async for _ in rig.inference.Generate(request, metadata=(("authorization", "Bearer limited"),)):
            pass
    assert [submit.context.priority for submit in rig.scheduler.submits] == [5, 7, 5, -3, 5]
