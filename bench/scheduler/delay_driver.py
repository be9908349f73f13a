"""Drives one scheduler's Session in a closed loop, and measures a window of it.

There are always so many requests that some wait. The first requests get lengths as if they had been running for a
while. So sequences end at a steady rate from the beginning. During the measurement, frames are only stored; counting
and checking come after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count

import grpc
import numpy as np
import uvloop

from bench.scheduler.delay_stack import DelayStack
from bench.scheduler.delay_workload import DelayWorkload
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_common.credit.hello import PROTOCOL_VERSION

# Requests in the scheduler for each row: beyond all slots, so that admission never waits for the driver.
_PER_ROW = 3.5
# Successors go in together once this share of the rows has ended: messages one by one would cost more than the rest.
_SHARE_PER_SUBMIT = 16


@dataclass(frozen=True)
class Measured:
    """The figures of one window. Shares are of the throughput that rows and step time would allow."""

    seconds: float
    decode_tokens: int
    steps: int
    efficiency: float
    busy: float
    """Share of the window in which a step ran."""
    fill: float
    """Decode tokens per step and row."""
    scheduler_us_per_step: float
    worker_us_per_step: float
    longest_gap_ms: float
    """Between two frames with tokens, as they arrived here."""
    checked: int
    """Requests that ended and had the right tokens."""


@dataclass(frozen=True)
class _Mark:
    frames: int
    at: float
    steps: int
    cpu_s: dict[str, float]


class _Session:
    """The stream, and the frames that came over it."""

    def __init__(self, stack: DelayStack, work: DelayWorkload, rows: int) -> None:
        self._stack = stack
        self._work = work
        self._handles = count()
        self.frames: list[scheduler_pb2.SessionResponse] = []
        self.times: list[float] = []
        self.length: dict[int, int] = {}
        self._rows = rows
        self._ended = 0
        self._channel = grpc.aio.insecure_channel(stack.address)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).Session()

    async def open(self) -> None:
        """Send the hello and the first requests."""
        hello = scheduler_pb2.SessionHello(protocol_version=PROTOCOL_VERSION, router_id="bench")
        await self._call.write(scheduler_pb2.SessionRequest(hello=hello))
        await self._call.read()
        residual = self._work.rng.random(self._rows)
        await self._submit([1 + int(share * self._work.length(handle)) for handle, share in enumerate(residual)])
        await self._submit([0] * round(self._rows * (_PER_ROW - 1)))

    async def run_until(self, end: float) -> _Mark:
        """Serve until the first frame after this time."""
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            now = time.monotonic()
            if not frame.handle and not frame.failed:
                continue
            self.frames.append(frame)
            self.times.append(now)
            self._ended += len(frame.finish) - frame.finish.count(0)
            if self._ended >= self._rows // _SHARE_PER_SUBMIT:
                await self._submit([0] * self._ended)
                self._ended = 0
            if frame.failed:
                raise RuntimeError(f"a request failed: {frame.failed[0].error}")
            if now >= end and frame.token:
                return _Mark(len(self.frames), now, self._stack.steps(), self._stack.cpu_s())
        raise RuntimeError("the session ended")

    async def close(self) -> None:
        """End the session, and with it its requests."""
        self._call.cancel()
        await self._channel.close()

    async def _submit(self, lengths: list[int]) -> None:
        message = scheduler_pb2.SessionRequest()
        for length in lengths:
            handle = next(self._handles)
            submit = self._work.submit(handle, length)
            self.length[handle] = submit.sequence.stop.max_tokens
            message.submit.append(submit)
        await self._call.write(message)


def measure(
    stack: DelayStack, work: DelayWorkload, rows: int, step_ms: float, ramp_s: float, seconds: float
) -> Measured:
    """Measure one run on an idle stack, which is idle again afterwards. Raises RuntimeError for a wrong token."""
    session, begin, end = uvloop.run(_serve(stack, work, rows, ramp_s, seconds))
    tokens = _decode_tokens(session.frames, begin.frames, end.frames)
    checked = _check(session, work)
    stack.until_idle()
    elapsed, steps = end.at - begin.at, max(1, end.steps - begin.steps)
    spent = {name: (end.cpu_s[name] - begin.cpu_s[name]) * 1e6 / steps for name in end.cpu_s}
    return Measured(
        seconds=elapsed,
        decode_tokens=tokens,
        steps=steps,
        efficiency=tokens / elapsed * step_ms / 1e3 / rows,
        busy=steps * step_ms / 1e3 / elapsed,
        fill=tokens / steps / rows,
        scheduler_us_per_step=spent["scheduler"],
        worker_us_per_step=spent["worker"],
        longest_gap_ms=float(np.diff(session.times[begin.frames - 1 : end.frames]).max()) * 1e3,
        checked=checked,
    )


async def _serve(
    stack: DelayStack, work: DelayWorkload, rows: int, ramp_s: float, seconds: float
) -> tuple[_Session, _Mark, _Mark]:
    session = _Session(stack, work, rows)
    try:
        await session.open()
        begin = await session.run_until(time.monotonic() + ramp_s)
        return session, begin, await session.run_until(begin.at + seconds)
    finally:
        await session.close()


def _decode_tokens(frames: list[scheduler_pb2.SessionResponse], first: int, last: int) -> int:
    """Return the number of tokens of frames first..last, without the first token of each request, which comes from
    prefill."""
    started: set[int] = set()
    for frame in frames[:first]:
        started.update(_i32(frame.handle).tolist())
    total = 0
    for frame in frames[first:last]:
        new = set(_i32(frame.handle).tolist()) - started
        started |= new
        total += len(frame.token) // 4 - len(new)
    return total


def _check(session: _Session, work: DelayWorkload) -> int:
    """Compare the tokens of every request that ended. Returns their number."""
    rows = np.concatenate([_i32(frame.handle) for frame in session.frames])
    counts = np.concatenate([_i32(frame.count) for frame in session.frames])
    token = np.concatenate([_i32(frame.token) for frame in session.frames])
    ended = np.concatenate([np.frombuffer(frame.finish, np.uint8) for frame in session.frames])
    owner = np.repeat(rows, counts)
    order = np.argsort(owner, kind="stable")
    owner, token = owner[order], token[order]
    finished = rows[ended > 0]
    first, last = np.searchsorted(owner, finished), np.searchsorted(owner, finished, side="right")
    for handle, begin, end in zip(finished.tolist(), first.tolist(), last.tolist(), strict=True):
        wanted = work.answer(handle)[: session.length[handle]]
        if not np.array_equal(token[begin:end], wanted):
            raise RuntimeError(f"request {handle} got {token[begin:end].tolist()} instead of {wanted.tolist()}")
    return len(finished)


def _i32(column: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(column, "<i4")
