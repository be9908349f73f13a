"""SteadyReplica: a scheduler and a worker process with default settings, and a closed loop of requests on their
session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType

import grpc
import numpy as np

from bench.harness.processes import Service
from quire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from quire_common import sequence
from quire_common.credit.hello import PROTOCOL_VERSION

_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, (96, 160)
_VOCABULARY = (300, 4000)


@dataclass
class Load:
    """Output tokens so far."""

    tokens: int = 0


class SteadyReplica:
    """A context manager, which is ready when entered. `prefix` is put before the worker's command line."""

    def __init__(self, model: str, prefix: Sequence[str] = ()) -> None:
        self.worker = Service("worker", f"--model={model}", "--device=cpu", prefix=prefix)
        self._scheduler: Service | None = None

    def __enter__(self) -> SteadyReplica:
        try:
            self._scheduler = Service("scheduler", f"--worker={self.worker.ready()}")
            self._address = self._scheduler.ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @asynccontextmanager
    async def load(self, streams: int) -> AsyncIterator[Load]:
        """Keep `streams` requests with random prompts running until the block ends. A request that fails ends the
        block."""
        counted = Load()
        async with grpc.aio.insecure_channel(self._address) as channel:
            task = asyncio.create_task(_drive(scheduler_pb2_grpc.SchedulerStub(channel), streams, counted))
            try:
                yield counted
                if task.done():
                    await task
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _stop(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
        self.worker.stop()


async def _drive(stub: scheduler_pb2_grpc.SchedulerStub, streams: int, counted: Load) -> None:
    rng, handles = np.random.default_rng(0), count()
    call = stub.Session()
    hello = scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION, router_id="bench")
    await call.write(scheduler_pb2.SessionRequest(hello=hello))
    await call.read()

    async def submit(requests: int) -> None:
        message = scheduler_pb2.SessionRequest()
        for handle in (next(handles) for _ in range(requests)):
            message.submit.append(_request(rng, handle))
        await call.write(message)

    await submit(streams)
    while (frame := await call.read()) is not grpc.aio.EOF:
        if frame.failed:
            raise RuntimeError(f"a request failed: {frame.failed[0].error}")
        counted.tokens += len(frame.token) // 4
        if ended := len(frame.finish) - frame.finish.count(0):
            await submit(ended)
    raise RuntimeError("the session ended")


def _request(rng: np.random.Generator, handle: int) -> scheduler_pb2.Submit:
    prompt = rng.integers(*_VOCABULARY, _PROMPT_TOKENS).astype(np.int32)
    stop = sequence.Stop(max_tokens=int(rng.integers(*_OUTPUT_TOKENS)), ignore_eos=True)
    return scheduler_pb2.Submit(
        handle=handle,
        context=common_pb2.RequestContext(request_id=f"bench-{handle}"),
        sequence=sequence.sequence_to_pb(sequence.Sequence(prompt, stop)),
    )
