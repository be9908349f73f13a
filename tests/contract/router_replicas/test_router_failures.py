"""The router handles clients that disconnect, peers that die, and overload."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.columns import i32
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

WAIT_S = 60


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def stream(rig: RouterRig, prompt: str, **fields: Any) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
    body = {"prompt": prompt, "stream": True, "max_tokens": 3000, **fields}
    return rig.http.stream("POST", "/v1/completions", json=body)


def nothing_left(rig: RouterRig) -> bool:
    left = [fake.running for fake in rig.schedulers] + [fake.open_handles for fake in rig.tokenizers]
    return not any(left) and not any(r.session.sequences for r in rig.router.fleet.replicas.values())


async def server_load(rig: RouterRig) -> int:
    return int((await rig.http.get("/load")).json()["server_load"])


async def test_disconnected_streaming_client_aborts_its_sequences() -> None:
    async with router_rig() as rig:
        async with stream(rig, "abc", n=3) as response:
            await anext(response.aiter_bytes())
            assert len(rig.scheduler.running) == 3
        await until(lambda: nothing_left(rig))
        assert sorted(rig.scheduler.aborts) == sorted(s.handle for s in rig.scheduler.submits)
        assert await server_load(rig) == 0


async def test_disconnected_client_without_streaming_aborts_its_sequence() -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=100))
        await until(lambda: len(rig.scheduler.running) == 1)
        waiting.cancel()
        await until(lambda: nothing_left(rig))
        assert len(rig.scheduler.aborts) == 1


async def test_client_disconnect_during_tokenization_frees_its_admission() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.hold_encode = asyncio.Event()
    async with router_rig(tokenizers=[tokenizer]) as rig:
        waiting = asyncio.ensure_future(rig.complete("abc"))
        await until(lambda: len(tokenizer.encode_contexts) == 1)
        assert await server_load(rig) == 1
        waiting.cancel()
        await until(lambda: rig.router.admission.inside == 0)
        assert not rig.scheduler.submits


async def test_cancelled_grpc_call_aborts_its_sequence() -> None:
    async with router_rig() as rig:
        call = rig.inference.Generate(ib.GenerateRequest(text="abc", max_tokens=3000))
        await call.read()
        call.cancel()
        await until(lambda: nothing_left(rig))
        assert len(rig.scheduler.aborts) == 1


async def test_requests_over_the_limit_get_429_with_retry_after() -> None:
    async with router_rig(max_concurrent_requests=3) as rig:
        rig.scheduler.gate.clear()
        inside = asyncio.ensure_future(rig.complete("abc", max_tokens=2, n=3))
        await until(lambda: len(rig.scheduler.running) == 3)
        refused = await rig.complete("abc")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "TOO_MANY_REQUESTS"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.inference.Generate(ib.GenerateRequest(text="a")).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        rig.scheduler.gate.set()
        assert (await inside).status_code == 200
        assert (await rig.complete("abc", max_tokens=2)).status_code == 200


async def test_scheduler_refusal_is_passed_to_the_client() -> None:
    async with router_rig() as rig:
        rig.scheduler.refuse = pb.RequestError(
            code="QUEUE_FULL",
            message="Full.",
            fix="Wait.",
            grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
            retry_after_s=7,
        )
        for extra in ({}, {"stream": True}):
            refused = await rig.complete("abc", **extra)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
            assert refused.headers["retry-after-ms"] == "7000"
            assert refused.json()["error"]["code"] == "QUEUE_FULL"
        await until(lambda: nothing_left(rig))


async def test_lost_scheduler_gives_503_before_the_first_token_and_an_error_event_after() -> None:
    async with router_rig(migration_wait_s=0.2) as rig:
        async with stream(rig, "abc") as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            rig.scheduler.gate.clear()
            early = asyncio.ensure_future(rig.complete("abc"))
            await until(lambda: len(rig.scheduler.running) == 2)
            await rig.scheduler_hosts[0].stop()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "NO_HEALTHY_REPLICA"
        lost = await early
        assert lost.status_code == 503 and lost.headers["retry-after"]
        nobody = await rig.complete("abc")
        assert nobody.status_code == 503 and nobody.json()["error"]["code"] == "NO_HEALTHY_REPLICA"
        assert nobody.headers["retry-after"] and (await rig.http.get("/health")).status_code == 503
        rig.scheduler.gate.set()
        await rig.scheduler_hosts[0].start()
        await until(lambda: rig.router.fleet.ready)
        assert (await rig.complete("abc", max_tokens=3)).json()["choices"][0]["text"] == "abc"


async def test_broken_grpc_stream_ends_with_an_error_message() -> None:
    async with router_rig(migration_wait_s=0.2) as rig:
        call = rig.inference.Generate(ib.GenerateRequest(text="abc", max_tokens=3000))
        first = await anext(aiter(call))
        assert first.text
        await rig.scheduler_hosts[0].stop()
        answers = [answer async for answer in call]
        assert answers[-1].error.code == "NO_HEALTHY_REPLICA"
        assert answers[-1].finish_reason == pb.FINISH_REASON_ERROR


async def test_another_tokenizer_continues_after_a_tokenizer_dies() -> None:
    async with router_rig(tokenizers=[FakeTokenizer(), FakeTokenizer()]) as rig:
        async with stream(rig, "aé😀bc", max_tokens=900, logprobs=0) as response:
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                used = [i for i, fake in enumerate(rig.tokenizers) if fake.opens]
                if len(used) == 1 and body.count(b"data: {") > 20:
                    await rig.tokenizer_hosts[used[0]].stop()
        chunks = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        assert "".join(c["choices"][0]["text"] for c in chunks) == "aé😀bc" * 100
        logprobs = [value for c in chunks for value in c["choices"][0]["logprobs"]["token_logprobs"]]
        assert logprobs == [-1.0 - i for i in range(900)]  # no token lost, none repeated
        taken_up = [fake.opens[0] for fake in rig.tokenizers if fake.opens and fake.opens[0].chars_sent]
        assert len(taken_up) == 1 and len(i32(taken_up[0].prior_ids)) > 0


async def test_requests_fail_without_tokenizers_and_recover_with_one() -> None:
    async with router_rig(connect_timeout_s=0.2) as rig:
        await rig.tokenizer_hosts[0].stop()
        refused = await rig.complete("abc")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "NO_TOKENIZER"
        assert (await rig.http.get("/health")).status_code == 503
        await rig.tokenizer_hosts[0].start()
        await until(lambda: rig.router.pool.ready)
        assert (await rig.complete("abc", max_tokens=3)).json()["choices"][0]["text"] == "abc"


async def test_requests_go_to_the_least_loaded_of_two() -> None:
    async with router_rig([FakeScheduler(), FakeScheduler()]) as rig:
        first, second = rig.schedulers
        first.gate.clear()
        second.gate.clear()
        waiting = [asyncio.ensure_future(rig.complete("abc", max_tokens=3)) for _ in range(8)]
        await until(lambda: len(first.running) + len(second.running) == 8)
        assert len(first.running) == len(second.running) == 4
        second.extra_load = 20
        second.report()
        loaded = rig.router.fleet.replicas[rig.scheduler_hosts[1].address]
        await until(lambda: loaded.load.running >= 20)
        waiting.append(asyncio.ensure_future(rig.complete("abc", max_tokens=3)))
        await until(lambda: len(first.running) == 5)
        first.gate.set()
        second.gate.set()
        assert [r.json()["choices"][0]["text"] for r in await asyncio.gather(*waiting)] == ["abc"] * 9
        assert len({s.handle for fake in rig.schedulers for s in fake.submits}) == 9  # unique over both


async def test_draining_scheduler_gets_no_new_requests_and_finishes_old_ones() -> None:
    async with router_rig([FakeScheduler(), FakeScheduler()]) as rig:
        first, second = rig.schedulers
        first.gate.clear()
        waiting = [asyncio.ensure_future(rig.complete("abc", max_tokens=3)) for _ in range(2)]
        await until(lambda: len(first.running) == 1)
        first.set_phase("draining")
        replica = rig.router.fleet.replicas[rig.scheduler_hosts[0].address]
        await until(lambda: replica.load.phase == "draining")
        for _ in range(4):
            assert (await rig.complete("abc", max_tokens=3)).status_code == 200
        assert len(first.submits) == 1 and len(second.submits) == 5
        first.gate.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]


async def test_loss_of_one_of_two_schedulers_fails_no_request() -> None:
    async with router_rig([FakeScheduler(), FakeScheduler()]) as rig:
        for fake in rig.schedulers:
            fake.gate.clear()
        waiting = [asyncio.ensure_future(rig.complete("abc", max_tokens=3)) for _ in range(2)]
        await until(lambda: all(fake.running for fake in rig.schedulers))
        await rig.scheduler_hosts[0].stop()
        rig.schedulers[1].gate.set()
        assert [r.json()["choices"][0]["text"] for r in await asyncio.gather(*waiting)] == ["abc", "abc"]
        assert (await rig.complete("abc", max_tokens=3)).status_code == 200


async def test_readyz_shows_loading_progress() -> None:
    scheduler = FakeScheduler(phase="loading")
    scheduler.progress, scheduler.detail = 0.25, "weights 1 of 4"
    async with router_rig([scheduler], wait_ready=False) as rig:
        await until(lambda: any(r.load.phase == "loading" for r in rig.router.fleet.replicas.values()))
        loading = await rig.http.get("/readyz")
        assert loading.status_code == 503 and loading.json()["ready"] is False
        shown = loading.json()["schedulers"][0]
        assert (shown["phase"], shown["progress"], shown["detail"]) == ("loading", 0.25, "weights 1 of 4")
        assert (await rig.http.get("/livez")).status_code == 200
        early = await rig.complete("abc")
        assert early.status_code == 503 and early.json()["error"]["code"] == "NO_HEALTHY_REPLICA"
        scheduler.set_phase("ready")
        await until(lambda: rig.router.fleet.ready and rig.router.pool.ready)
        assert (await rig.http.get("/readyz")).json()["ready"] is True
        assert (await rig.complete("abc", max_tokens=3)).status_code == 200


async def test_deadlines_end_requests() -> None:
    async with router_rig(request_timeout_s=2.0) as rig:
        rig.scheduler.gate.clear()
        late = await rig.complete("abc", timeout_s=0.3)
        assert late.status_code == 504 and late.json()["error"]["code"] == "REQUEST_TIMEOUT"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.inference.Generate(ib.GenerateRequest(text="a", timeout_ms=100)).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        rig.scheduler.gate.set()
        rig.scheduler.step_s = 0.02
        streamed = await rig.complete("abc", max_tokens=3000, stream=True)
        *_, error, done = [line for line in streamed.text.split("\n\n") if line]
        assert done == "data: [DONE]" and json.loads(error[6:])["error"]["code"] == "REQUEST_TIMEOUT"
        await until(lambda: nothing_left(rig))


async def test_scheduler_gets_the_time_that_the_tokenizer_left() -> None:
    async with router_rig() as rig:
        rig.tokenizer.hold_encode = asyncio.Event()
        held_s = 0.5
        asyncio.get_running_loop().call_later(held_s, rig.tokenizer.hold_encode.set)
        assert (await rig.complete("abc", max_tokens=3, timeout_s=WAIT_S)).status_code == 200
        left_s = rig.scheduler.submits[0].context.time_left_ms / 1000
        # The timer began before the request.
        assert 0 < left_s < WAIT_S - held_s + 0.1


async def test_draining_router_refuses_new_requests_and_finishes_old_ones() -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        inside = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await until(lambda: len(rig.scheduler.running) == 1)
        draining = asyncio.ensure_future(rig.router.drain(WAIT_S))
        await until(lambda: not rig.router.admission.open)
        refused = await rig.complete("abc")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "DRAINING"
        assert (await rig.http.get("/readyz")).json()["router"]["phase"] == "draining"
        assert not draining.done()
        rig.scheduler.gate.set()
        await asyncio.wait_for(draining, WAIT_S)
        assert (await inside).status_code == 200


async def test_request_fails_if_its_scheduler_is_removed_and_no_other_takes_it() -> None:
    async with router_rig(migration_wait_s=0.2) as rig:
        rig.scheduler.gate.clear()
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await until(lambda: len(rig.scheduler.running) == 1)
        rig.router.fleet.update([])
        lost = await waiting
        assert lost.status_code == 503 and lost.json()["error"]["code"] == "NO_HEALTHY_REPLICA"
