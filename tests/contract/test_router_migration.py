"""Requests outlive their engines: whatever becomes of a scheduler, clients get what they would have got anyway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from quire_common.columns import i32
from quire_common.errors import Overloaded
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.router_rig import RouterRig, router_rig

WAIT_S = 30
PROMPT = "one two é😀 three"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def text(tokens: int, prompt: str = PROMPT) -> str:
    """What the fake model says."""
    data = prompt.encode()
    return (data * (tokens // len(data) + 1))[:tokens].decode("utf-8", "replace")


def pair(**options: Any) -> list[FakeScheduler]:
    return [FakeScheduler(**options), FakeScheduler(**options)]


def running(rig: RouterRig) -> FakeScheduler:
    """The scheduler that has something to do."""
    (busy,) = [fake for fake in rig.schedulers if fake.running]
    return busy


def host_of(rig: RouterRig, fake: FakeScheduler) -> Any:
    return rig.scheduler_hosts[rig.schedulers.index(fake)]


def submits(rig: RouterRig) -> list[Any]:
    return [submit for fake in rig.schedulers for submit in fake.submits]


def nothing_left(rig: RouterRig) -> bool:
    left = [fake.running for fake in rig.schedulers] + [fake.open_handles for fake in rig.tokenizers]
    return not any(left) and not any(r.session.choices for r in rig.router.fleet.replicas.values())


def chunks_of(body: str) -> list[Any]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index)


@contextlib.asynccontextmanager
async def held(rig: RouterRig, tokens: int, **fields: Any) -> Any:
    """A streamed request whose engine holds still after about `tokens` tokens; yields what collects the rest."""
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 200, "temperature": 0, **fields}
    async with rig.http.stream("POST", "/v1/completions", json=body) as response:
        lines, got = response.aiter_lines(), ""
        while got.count("data: {") < tokens:
            got += await anext(lines) + "\n"
        for fake in rig.schedulers:
            fake.gate.clear()

        async def rest() -> list[Any]:
            nonlocal got
            async for line in lines:
                got += line + "\n"
            assert got.rstrip().endswith("data: [DONE]")
            return chunks_of(got)

        yield rest


def release(rig: RouterRig) -> None:
    for fake in rig.schedulers:
        fake.gate.set()


async def drop(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.break_sessions()


async def die(rig: RouterRig, fake: FakeScheduler) -> None:
    await host_of(rig, fake).stop()


async def go_silent(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.hang()


async def fall_behind(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.break_sessions(Overloaded("SESSION_TOO_SLOW", "Too slow.", "Read faster."))


async def lose_worker(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("WORKER_LOST")


async def lose_pages(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.fail_all("PAGES_LOST", grpc.StatusCode.INTERNAL)


async def cut_drain_short(rig: RouterRig, fake: FakeScheduler) -> None:
    fake.set_phase("draining")
    fake.fail_all("DRAINING")


async def leave_discovery(rig: RouterRig, fake: FakeScheduler) -> None:
    rig.router.fleet.update([e for e in endpoints(rig) if e.address != host_of(rig, fake).address])


def endpoints(rig: RouterRig) -> list[Any]:
    from quire_common.discovery import Endpoint

    return [Endpoint(host.address, "scheduler", host.address) for host in rig.scheduler_hosts]


FAULTS = [drop, die, go_silent, fall_behind, lose_worker, lose_pages, cut_drain_short, leave_discovery]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_stream_goes_on_elsewhere(fault: Any) -> None:
    options = {"heartbeat_ms": 100, "cached_tokens": 3, "step_s": 0.002}
    async with router_rig(pair(**options), replica_timeout_s=0.4) as rig:
        usage = {"stream_options": {"include_usage": True}}
        async with held(rig, 20, logprobs=1, **usage) as rest:
            first = running(rig)
            (other,) = [fake for fake in rig.schedulers if fake is not first]
            other.cached_tokens = 17
            await fault(rig, first)
            await until(lambda: bool(other.running))
            release(rig)
            chunks = await rest()
        await until(lambda: len(other.submits) == 1)
        before, after = first.submits[0], other.submits[0]
    *chunks, last = chunks
    assert joined(chunks) == text(200)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 200 and last["usage"]["prompt_tokens"] == len(PROMPT.encode())
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3  # as the first engine had it
    logprobs = [c["choices"][0]["logprobs"] for c in chunks]
    assert [value for entry in logprobs for value in entry["token_logprobs"]] == [-1.0 - i for i in range(200)]
    offsets = [value for entry in logprobs for value in entry["text_offset"]]
    assert offsets == [len(text_of_bytes(i)) for i in range(200)]
    emitted = i32(after.sequence.output_ids).tolist()
    data = PROMPT.encode()
    assert len(emitted) >= 20 and emitted == [data[i % len(data)] for i in range(len(emitted))]
    assert (before.context.attempt, after.context.attempt) == (0, 1)
    assert before.handle != after.handle
    assert after.context.request_id == before.context.request_id
    assert after.sequence.sampling == before.sequence.sampling and after.sequence.stop == before.sequence.stop


def text_of_bytes(count: int) -> str:
    """Whole characters of the first bytes of the answer."""
    data = PROMPT.encode()
    return (data * (count // len(data) + 1))[:count].decode("utf-8", "ignore")
