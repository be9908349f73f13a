"""The router is killed: its clients take up their streams with the next one, to the same tokens, and ask on."""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest

from quire import AsyncClient, RequestOutput, SamplingParams, Unavailable
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


async def stream(client: AsyncClient, prompt: str, begun: asyncio.Event) -> RequestOutput:
    """The whole answer; `begun` is set at its first token. Only a stream that has begun is resumed."""
    output = RequestOutput(prompt=prompt)
    async for delta in client.generate(prompt, PARAMS, return_token_ids=True):
        begun.set()
        output.add(delta)
    return output


async def test_clients_resume_at_a_restarted_router() -> None:
    async with Rig("paced 10") as rig, AsyncClient(rig.stack.grpc) as client:
        wanted = (await client.complete("ROMEO:", SHORT)).outputs[0].text
        prompts = [f"STREAM {n}" for n in range(STREAMS)]
        begun = [asyncio.Event() for _ in prompts]
        running = [asyncio.create_task(stream(client, *each)) for each in zip(prompts, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        assert rig.service("router").process.signal(signal.SIGKILL)
        began = time.monotonic()
        assert await ask_until_answered(client, began + LIMIT_S) == wanted
        print(f"answered again after {time.monotonic() - began:.1f} s")
        ends = await asyncio.gather(*running)
        await asyncio.to_thread(rig.wait_pages_back)
        undisturbed = await asyncio.gather(*(client.complete(prompt, PARAMS) for prompt in prompts))
        assert [end.outputs[0].text for end in ends] == [each.outputs[0].text for each in undisturbed]
        assert all(end.usage is not None and end.usage.completion_tokens == PARAMS.max_tokens for end in ends)
        answer = await rig.http.post("/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 2})
        assert answer.status_code == httpx.codes.OK
        assert rig.service("router").restarts == 1
