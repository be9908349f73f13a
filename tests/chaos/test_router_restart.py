"""The router is killed: its streams end with a typed error, their pages come back, and the same clients ask on."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from quire import AsyncClient, QuireError, SamplingParams, Unavailable
from tests.chaos.rig import LIMIT_S, Rig

pytestmark = pytest.mark.slow
STREAMS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
SHORT = PARAMS.clone(max_tokens=20)


async def ask_until_answered(client: AsyncClient, deadline: float) -> str:
    """As a client does that is told to retry."""
    while True:
        try:
            return (await client.complete("ROMEO:", SHORT)).outputs[0].text
        except Unavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_clients_go_on_with_a_router_that_was_killed() -> None:
    async with Rig("paced 10") as rig, AsyncClient(rig.stack.grpc) as client:
        wanted = (await client.complete("ROMEO:", SHORT)).outputs[0].text
        running = [asyncio.create_task(client.complete(f"STREAM {n}", PARAMS)) for n in range(STREAMS)]
        while (await rig.router_metrics())["quire_router_sequences_in_flight"] < STREAMS:
            await asyncio.sleep(0.05)
        assert rig.service("router").process.signal(signal.SIGKILL)
        began = time.monotonic()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(end, QuireError) for end in ends), ends
        await asyncio.to_thread(rig.wait_pages_back)
        assert await ask_until_answered(client, began + LIMIT_S) == wanted
        print(f"answered again after {time.monotonic() - began:.1f} s")
        answer = await rig.http.post("/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 2})
        assert answer.status_code == httpx.codes.OK
        assert rig.service("router").restarts == 1
