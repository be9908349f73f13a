"""Tokenizers that hang, drain or return delay clients only briefly; gRPC health shows readiness."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import tokenizer_pb2
from quire_common.discovery import Endpoint
from quire_router.text.tokenizer_link import TokenizerLink
from tests.fakes.awake_clock import AwakeClock
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import PROMPT, WAIT_S, endpoints, held, joined, nothing_left, release, text, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def two(**config: Any) -> Any:
    return router_rig([FakeScheduler(step_s=0.002)], [FakeTokenizer(), FakeTokenizer()], **config)


def of_the_session(rig: RouterRig) -> tuple[FakeTokenizer, FakeTokenizer]:
    """The tokenizer that writes the text now, and the other one."""
    (one,) = [fake for fake in rig.tokenizers if fake.open_handles]
    return one, next(fake for fake in rig.tokenizers if fake is not one)


def healthy(rig: RouterRig) -> int:
    return sum(peer.healthy for peer in rig.router.pool.peers.values())


async def test_hanging_tokenizer_is_replaced_and_its_late_messages_are_ignored() -> None:
    async with two(tokenizer_timeout_s=0.3) as rig:
        async with held(rig, 20, logprobs=0, stop=["zzz"]) as rest:
            hung, other = of_the_session(rig)
            hung.awake.clear()
            release(rig)
            await until(lambda: bool(other.open_handles))
            hung.awake.set()
            chunks = await rest()
        assert joined(chunks) == text(200)
        values = [v for c in chunks for v in c["choices"][0]["logprobs"]["token_logprobs"]]
        assert values == [-1.0 - i for i in range(200)]
        assert other.opens[0].chars_sent > 10
        await until(lambda: nothing_left(rig) and healthy(rig) == 2)


async def test_tokenizer_without_work_may_be_silent() -> None:
    async with two(tokenizer_timeout_s=0.2) as rig:
        async with held(rig, 5) as rest:
            hung, _ = of_the_session(rig)
            await until(lambda: hung.steps >= 5)
            await asyncio.sleep(0.6)  # what is asserted is that nothing happens
            release(rig)
            assert joined(await rest()) == text(200)
        assert healthy(rig) == 2 and not of_others(rig, hung).opens


def of_others(rig: RouterRig, one: FakeTokenizer) -> FakeTokenizer:
    return next(fake for fake in rig.tokenizers if fake is not one)


async def test_prompts_are_encoded_by_another_tokenizer_if_one_hangs() -> None:
    async with two(tokenizer_timeout_s=0.3) as rig:
        rig.tokenizers[0].awake.clear()
        for ask in (rig.complete, rig.chat, rig.complete, rig.chat):
            answer = await ask("abc", max_tokens=3)
            assert answer.status_code == 200, answer.text
        assert healthy(rig) == 1
        rig.tokenizers[0].awake.set()
        await until(lambda: healthy(rig) == 2)


async def test_call_waits_for_a_hanging_tokenizer_at_most_tokenizer_timeout_s() -> None:
    async with two(tokenizer_timeout_s=2.0) as rig:
        rig.tokenizers[0].awake.clear()
        pool = rig.router.pool
        async with AwakeClock() as clock:
            while healthy(rig) == 2:  # they are asked in turn
                await pool.call(lambda peer: peer.stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest()))
            assert clock.passed_s < 3.5
        rig.tokenizers[0].awake.set()


@pytest.mark.parametrize("hangs", [False, True])
async def test_call_goes_to_another_tokenizer_if_discovery_drops_one(hangs: bool) -> None:
    """The channel to the dropped one closes under the call, or under the short call that asks whether it hangs."""
    async with two(tokenizer_timeout_s=1.0 if hangs else 20.0) as rig:
        pool, asked = rig.router.pool, list[str]()

        async def make(peer: TokenizerLink) -> str:
            asked.append(peer.address)
            if hangs and len(asked) == 1:
                await asyncio.Event().wait()
            await peer.stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest())
            return peer.address

        for fake in rig.tokenizers:
            fake.awake.clear()
        before = sum(fake.infos for fake in rig.tokenizers)
        call = asyncio.ensure_future(pool.call(make))
        await until(lambda: sum(fake.infos for fake in rig.tokenizers) > before)
        (other,) = [number for number, host in enumerate(rig.tokenizer_hosts) if host.address not in asked]
        rig.tokenizers[other].awake.set()
        address = rig.tokenizer_hosts[other].address
        pool.update([Endpoint(address, "tokenizer", address)])
        assert await call == address


async def test_long_tokenization_does_not_count_as_hanging() -> None:
    async with two(tokenizer_timeout_s=0.2) as rig:
        for fake in rig.tokenizers:
            fake.hold_encode = asyncio.Event()
        waiting = asyncio.ensure_future(rig.complete("abc", max_tokens=3))
        await asyncio.sleep(0.8)  # what is asserted is that nothing happens
        assert sum(bool(fake.encode_contexts) for fake in rig.tokenizers) == 1 and healthy(rig) == 2
        for fake in rig.tokenizers:
            if fake.hold_encode is not None:
                fake.hold_encode.set()
        assert (await waiting).json()["choices"][0]["text"] == "abc"


async def test_draining_tokenizer_finishes_its_sequences_and_gets_no_new_ones() -> None:
    async with two() as rig:
        async with held(rig, 10) as rest:
            leaving, other = of_the_session(rig)
            await leaving.stop_serving()
            await until(lambda: healthy(rig) == 1)
            encoded = len(leaving.encode_contexts)
            release(rig)
            assert joined(await rest()) == text(200)
            assert not other.opens  # it ended where it was
        for _ in range(3):
            assert (await rig.complete(PROMPT, max_tokens=30)).json()["choices"][0]["text"] == text(30)
        assert len(leaving.encode_contexts) == encoded and len(other.opens) == 3


async def test_sequences_move_off_a_draining_tokenizer_with_new_ones() -> None:
    async with two() as rig, held(rig, 10) as rest:
        leaving, other = of_the_session(rig)
        await leaving.stop_serving()
        await until(lambda: healthy(rig) == 1)
        new = asyncio.ensure_future(rig.complete(PROMPT, max_tokens=30))
        await until(lambda: len(other.opens) == 2)
        release(rig)
        assert joined(await rest()) == text(200)
        assert (await new).json()["choices"][0]["text"] == text(30)


async def test_running_requests_wait_longer_for_a_tokenizer_than_new_ones() -> None:
    async with router_rig([FakeScheduler(step_s=0.002)], connect_timeout_s=0.1) as rig, held(rig, 10) as rest:
        release(rig)
        await rig.tokenizer_hosts[0].stop()
        assert (await rig.complete("abc")).json()["error"]["code"] == "NO_TOKENIZER"
        await rig.tokenizer_hosts[0].start()
        assert joined(await rest()) == text(200)


async def test_grpc_health_follows_readiness() -> None:
    async with router_rig() as rig, grpc.aio.insecure_channel(rig.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="quire.v1.Inference"))

        async def next_status() -> int:
            return int((await asyncio.wait_for(watch.read(), WAIT_S)).status)

        assert await next_status() == SERVING
        rig.router.fleet.update([])
        assert await next_status() == NOT_SERVING
        rig.router.fleet.update(endpoints(rig))
        assert await next_status() == SERVING
        await rig.scheduler_hosts[0].stop()
        assert await next_status() == NOT_SERVING
        await rig.scheduler_hosts[0].start()
        assert await next_status() == SERVING
        await rig.tokenizer_hosts[0].stop()
        assert await next_status() == NOT_SERVING
        assert (await rig.http.get("/health")).status_code == 503
        await rig.tokenizer_hosts[0].start()
        assert await next_status() == SERVING
        watch.cancel()
