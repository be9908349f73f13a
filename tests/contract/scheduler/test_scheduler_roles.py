"""Roles over real gRPC: told to routers, changed without a restart, and no reason to refuse anything but meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quire.v1 import scheduler_pb2
from quire_common.errors import from_rpc_error
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, Stack, stack
from tests.fakes.worker.fake_worker import undisturbed

PREFILL = scheduler_pb2.KvTransfer(prefill_only=True)
DECODE = scheduler_pb2.KvTransfer(await_handover=True)


async def set_role(s: Stack, role: str, timeout_ms: int = 0) -> Any:
    return await s.stub.SetRole(scheduler_pb2.SetRoleRequest(role=role, drain_timeout_ms=timeout_ms))


async def told_role(s: Stack) -> tuple[str, str]:
    info = await s.stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest())
    load = await anext(aiter(s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest())))
    return info.role, load.role


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_role_is_advice_and_refuses_nothing() -> None:
    async with stack(role="prefill", name=b"prefill") as s:
        assert await told_role(s) == ("prefill", "prefill")
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(9, 4)})
        await router.done(1)
        assert router.tokens[1] == undisturbed(a_sequence(9, 4))[0]
        assert (await set_role(s, "decode")).former_role == "prefill"
        assert await told_role(s) == ("decode", "decode")
        await router.submit({2: a_sequence(9, 4)}, PREFILL)
        await router.until(lambda: 2 in router.prefilled)


@pytest.mark.parametrize(("role", "expects"), [("prefill", True), ("decode", True), ("both", False)])
async def test_worker_is_told_whether_transfers_will_come(role: str, expects: bool) -> None:
    async with stack(role=role) as s:
        assert s.worker.greeting.expects_peers is expects


async def test_load_watchers_see_a_role_change_at_once() -> None:
    async with stack() as s:
        watch = s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=60_000))
        assert (await watch.read()).role == "both"
        await set_role(s, "decode")
        assert (await asyncio.wait_for(watch.read(), 5)).role == "decode"


async def test_role_change_lets_admitted_requests_finish() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.005
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(9, 60)})
        await router.until(lambda: len(router.tokens.get(1, ())) > 2)
        change = asyncio.ensure_future(set_role(s, "prefill"))
        await s.until(lambda: bool(s.engine.roles._next))
        await router.submit({2: a_sequence(9, 4)})
        await router.submit({3: a_sequence(9, 4)}, DECODE)
        await router.submit({4: a_sequence(9, 4)}, PREFILL)
        await router.until(lambda: 4 in router.prefilled)
        assert {handle: error.code for handle, error in router.failed.items()} == {
            2: "ROLE_CHANGING",
            3: "ROLE_CHANGING",
        }
        assert router.failed[2].retry_after_s > 0 and router.failed[2].http_status == 503
        assert (await failure(set_role(s, "both"))).code == "ROLE_CHANGE_UNDER_WAY"
        assert not change.done() and await told_role(s) == ("both", "both")
        answer = await change
        assert (answer.former_role, answer.aborted) == ("both", 0)
        assert router.tokens[1] == undisturbed(a_sequence(9, 60))[0]
        await router.submit({5: a_sequence(9, 4)})
        await router.done(5)


async def test_role_change_ends_requests_after_its_drain_timeout() -> None:
    async with stack(max_model_len=256, name=b"prefill") as s:
        s.worker.step_s = 0.01
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(9, 200), 2: a_sequence(9, 200)})
        await router.submit({3: a_sequence(9, 4)}, PREFILL)
        await router.until(lambda: 3 in router.prefilled)
        assert (await set_role(s, "prefill", 50)).aborted == 2
        await router.done(1, 2)
        assert router.failed[1].code == "ROLE_CHANGING"
        assert s.core.load().open_transfers == 1
        answer = await set_role(s, "decode", 50)
        assert (answer.former_role, answer.aborted) == ("prefill", 0)
        await s.until_quiet()
        assert s.core.stats.transfers == {"failed": 1}


async def test_cancelled_role_change_changes_nothing() -> None:
    async with stack(max_model_len=256) as s:
        s.worker.step_s = 0.01
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(9, 200)})
        await router.until(lambda: 1 in router.admitted)
        call = s.stub.SetRole(scheduler_pb2.SetRoleRequest(role="prefill"))
        await s.until(lambda: bool(s.engine.roles._next))
        call.cancel()
        await s.until(lambda: not s.engine.roles._next)
        assert await told_role(s) == ("both", "both")
        await router.submit({2: a_sequence(9, 4)})
        await router.done(2)
        assert (await failure(set_role(s, "draft"))).code == "BAD_ROLE"
