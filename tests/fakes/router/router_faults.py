"""What router tests of broken engines share: requests that are held in the middle, and ways to read their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from quire_common.discovery import Endpoint
from quire_router.sequences.sequence_state import SequenceState
from tests.fakes.router.router_rig import RouterRig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

WAIT_S = 60
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


def inside(rig: RouterRig) -> list[SequenceState]:
    """What engines have, as the router sees it."""
    return [
        sequence for replica in rig.router.fleet.replicas.values() for sequence in replica.session.sequences.values()
    ]


def nothing_left(rig: RouterRig) -> bool:
    left = [fake.running for fake in rig.schedulers] + [fake.open_handles for fake in rig.tokenizers]
    return not any(left) and not any(r.session.sequences for r in rig.router.fleet.replicas.values())


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


def endpoints(rig: RouterRig) -> list[Endpoint]:
    return [Endpoint(host.address, "scheduler", host.address) for host in rig.scheduler_hosts]
