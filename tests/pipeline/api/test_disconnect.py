"""Clients that leave in mid-stream: what they held is given back."""

from __future__ import annotations

import asyncio

import httpx

from quire import AsyncClient, Client, SamplingParams
from quire.local.stack import LocalStack
from tests.pipeline.load_watch import LoadWatch

# Nearly the whole context: what nobody aborts runs for far longer than is waited below, the more so where all is slow.
TOKENS = 8000
LONG = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PROMPT = "HAMLET:\nTo be, or not to be, that is the question:\n"
CLIENTS = 200
# From the last disconnect until no page is referenced.
LIMIT_S, ONE_LIMIT_S = 60.0, 15.0


async def leave_early(address: str, index: int) -> None:
    async with AsyncClient(address) as client:
        seen = 0
        async for _ in client.generate(f"{PROMPT}{index}", LONG):
            seen += 1
            if seen >= 1 + index % 3:
                return  # the channel closes under the stream, as when a process dies


def test_disconnected_clients_free_every_page(stack: LocalStack) -> None:
    async def crowd() -> None:
        await asyncio.gather(*(leave_early(stack.grpc, index) for index in range(CLIENTS)))

    with LoadWatch(stack) as watch:
        asyncio.run(crowd())
        watch.wait_idle(LIMIT_S)
    with Client(stack.grpc) as client:
        assert client.complete(PROMPT, SamplingParams(max_tokens=4)).finished


def test_disconnected_http_client_frees_its_pages(stack: LocalStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    with LoadWatch(stack) as watch:
        with (
            httpx.Client(base_url=stack.ready.http, timeout=LIMIT_S) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            lines = answer.iter_lines()  # held, since a reader that is collected hangs up
            assert next(lines)
            watch.wait_busy()
        watch.wait_idle(ONE_LIMIT_S)


def test_http_client_that_leaves_before_the_answer_frees_its_pages(stack: LocalStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=stack.ready.http, timeout=LIMIT_S) as http:
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.to_thread(watch.wait_busy)
            request.cancel()

    with LoadWatch(stack) as watch:
        asyncio.run(leave())
        watch.wait_idle(ONE_LIMIT_S)
