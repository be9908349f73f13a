"""A fake scheduler that emits at a given rate: every running sequence gets one token per step, from numpy columns.

It is for benchmarks of the services in front of it. Its own cost per step does not depend on the number of sequences.
It records when each token was emitted, so that a client can compute the latency. It knows no model: tokens cycle
through a list.

    python -m bench.router.stream_scheduler --rate 40000 --groups 1 --tokens-file ids.npy --said said.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from numpy.typing import NDArray

from quire.v1 import common_pb2, scheduler_pb2_grpc
from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import pack_i32
from quire_common.transport import SERVER_OPTIONS

_FINISH_LENGTH = 2


@dataclass
class Group:
    """Sequences that step together. Groups take turns, so that tokens are spread over time."""

    handles: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sent: int = 0


class StreamScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """`wait_for` sequences must have arrived before the first token. `rate` is tokens per second over all sequences."""

    def __init__(self, rate: float, groups: int, wait_for: int, token_ids: NDArray[np.int32]) -> None:
        self._rate = rate
        self._groups = [Group() for _ in range(groups)]
        self._wait_for = wait_for
        self._tokens = token_ids
        self._arrived = 0
        self._all_there = asyncio.Event()
        self.said: dict[str, list[int]] = {}

    def add(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        model = common_pb2.ModelInfo(
            name="bench", architecture="Bench", max_model_len=1 << 20, vocab_size=1 << 17, digest=b"bench"
        )
        return pb.GetModelInfoResponse(model=model, instance="bench", role="both")

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> AsyncIterator[pb.Load]:
        yield pb.Load(phase="ready", max_num_seqs=4096)
        await asyncio.Event().wait()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        yield pb.SessionResponse(welcome=pb.SessionWelcome(protocol_version=1))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            turn, due = 0, time.perf_counter()
            while True:
                if not any(group.handles for group in self._groups):
                    self._all_there.clear()
                    await self._all_there.wait()
                    due = time.perf_counter()
                group = self._groups[turn % len(self._groups)]
                turn += 1
                if not group.handles:
                    continue
                due += len(group.handles) / self._rate
                pause = due - time.perf_counter()
                if pause > 0:
                    await asyncio.sleep(pause)
                yield self._step(group)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            for submit in request.submit:
                group = self._groups[self._arrived % len(self._groups)]
                group.handles.append(submit.handle)
                group.left.append(submit.sequence.stop.max_tokens)
                group.names.append(submit.context.request_id)
                self.said[submit.context.request_id] = []
                self._arrived += 1
                if self._arrived % self._wait_for == 0:
                    self._all_there.set()

    def _step(self, group: Group) -> pb.SessionResponse:
        rows = len(group.handles)
        now_ns = time.monotonic_ns()
        for name in group.names:
            self.said[name].append(now_ns)
        token = self._tokens[group.sent % len(self._tokens)]
        group.sent += 1
        group.left = [left - 1 for left in group.left]
        finish = bytes(_FINISH_LENGTH if left <= 0 else 0 for left in group.left)
        message = pb.SessionResponse(
            handle=pack_i32(group.handles),
            count=np.ones(rows, np.int32).tobytes(),
            token=np.full(rows, token, np.int32).tobytes(),
            finish=finish,
        )
        if any(finish):
            for handle, ended in zip(group.handles, finish, strict=True):
                if ended:
                    message.finished.add(handle=handle)
            alive = [i for i, ended in enumerate(finish) if not ended]
            group.handles = [group.handles[i] for i in alive]
            group.left = [group.left[i] for i in alive]
            group.names = [group.names[i] for i in alive]
        return message


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=40_000)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--wait-for", type=int, default=256)
    parser.add_argument("--tokens-file", required=True)
    parser.add_argument("--said", required=True)
    options = parser.parse_args()
    fake = StreamScheduler(options.rate, options.groups, options.wait_for, np.load(options.tokens_file))
    uvloop.run(serve(fake))
    Path(options.said).write_text(json.dumps(fake.said))
    return 0


async def serve(fake: StreamScheduler) -> None:
    """Serve until the process is told to end."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    fake.add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    sys.exit(main())
