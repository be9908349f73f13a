"""Clients that leave in mid-stream: what they held is given back."""

from __future__ import annotations

import asyncio
import time

import grpc
import httpx

from quire import AsyncClient, Client, SamplingParams
from quire.local.stack import LocalStack
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
PROMPT = "HAMLET:\nTo be, or not to be, that is the question:\n"
CLIENTS = 200
# From the last disconnect until no page is referenced, on a machine that does other things too.
LIMIT_S = 1.0
BUSY_S = 60.0


class LoadWatch:
    """The scheduler's own account of its pages."""

    def __init__(self, stack: LocalStack) -> None:
        state = stack.directory.read()
        assert state is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{state.services['scheduler'].port}")
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._loads = stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=20))

    def __enter__(self) -> LoadWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._loads.cancel()
        self._channel.close()

    def seconds_until_idle(self, limit_s: float) -> float:
        """Until nothing runs, waits or references a page."""
        began = time.monotonic()
        for load in self._loads:
            idle = load.running == load.waiting == load.referenced_pages == 0
            if idle or time.monotonic() - began > limit_s:
                assert idle, f"after {limit_s} s: {load}"
                return time.monotonic() - began
        raise AssertionError("the scheduler ended its stream")

    def wait_busy(self) -> None:
        began = time.monotonic()
        for load in self._loads:
            if load.referenced_pages > 0:
                return
            assert time.monotonic() - began < BUSY_S, f"nothing runs: {load}"


async def leave_early(address: str, index: int) -> None:
    async with AsyncClient(address) as client:
        seen = 0
        async for _ in client.generate(f"{PROMPT}{index}", LONG):
            seen += 1
            if seen >= 1 + index % 3:
                return  # the channel closes under the stream, as when a process dies


def test_two_hundred_clients_that_disconnect_leave_no_page(stack: LocalStack) -> None:
    async def crowd() -> None:
        await asyncio.gather(*(leave_early(stack.grpc, index) for index in range(CLIENTS)))

    with LoadWatch(stack) as watch:
        asyncio.run(crowd())
        watch.seconds_until_idle(LIMIT_S)
    with Client(stack.grpc) as client:
        assert client.complete(PROMPT, SamplingParams(max_tokens=4)).finished


def test_an_http_client_that_disconnects_leaves_no_page(stack: LocalStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with LoadWatch(stack) as watch:
        with (
            httpx.Client(base_url=stack.ready.http) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            next(answer.iter_lines())
            watch.wait_busy()
        watch.seconds_until_idle(LIMIT_S)


def test_an_http_client_that_leaves_before_the_answer_leaves_no_page(stack: LocalStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=stack.ready.http) as http:
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.to_thread(watch.wait_busy)
            request.cancel()

    with LoadWatch(stack) as watch:
        asyncio.run(leave())
        watch.seconds_until_idle(LIMIT_S)
