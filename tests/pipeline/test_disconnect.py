"""Clients that leave in mid-stream: what they held is given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
    """The scheduler's own account of its pages. Every question opens a stream of its own: no frame is older than it."""

    def __init__(self, stack: LocalStack) -> None:
        state = stack.directory.read()
        assert state is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{state.services['scheduler'].port}")
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    def __enter__(self) -> LoadWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def wait_idle(self, limit_s: float) -> None:
        """Until nothing runs, waits or references a page."""
        self._wait(lambda load: load.running == load.waiting == load.referenced_pages == 0, limit_s)

    def wait_busy(self) -> None:
        """Until pages are referenced."""
        self._wait(lambda load: load.referenced_pages > 0, BUSY_S)

    def _wait(self, wanted: Callable[[scheduler_pb2.Load], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        loads = self._stub.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=20))
        try:
            for load in loads:
                if wanted(load):
                    return
                assert time.monotonic() < deadline, f"after {limit_s} s: {load}"
            raise AssertionError("the scheduler ended its stream")
        finally:
            loads.cancel()


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
        watch.wait_idle(LIMIT_S)
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
            lines = answer.iter_lines()  # held, since a reader that is collected hangs up
            assert next(lines)
            watch.wait_busy()
        watch.wait_idle(LIMIT_S)


def test_an_http_client_that_leaves_before_the_answer_leaves_no_page(stack: LocalStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=stack.ready.http) as http:
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.to_thread(watch.wait_busy)
            request.cancel()

    with LoadWatch(stack) as watch:
        asyncio.run(leave())
        watch.wait_idle(LIMIT_S)
