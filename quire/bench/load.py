"""Sends a list of requests on time over kept-alive connections, and records the outcome of each.

This is the part of one process; `load_processes` runs several processes. Arrivals form an open loop: a slow server does
not delay them, unless `max_concurrency` limits them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

from quire.bench.outcome import Outcome
from quire.bench.stream_connection import StreamConnection
from quire.bench.target import Target


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request and its time, `at_s` seconds after the common start."""

    index: int
    at_s: float
    body: bytes

    def to_json(self) -> str:
        """Encode the request as one line."""
        return json.dumps([self.index, self.at_s, self.body.decode("utf-8")])

    @classmethod
    def from_json(cls, line: str) -> PlannedRequest:
        """Decode what `to_json` encoded."""
        index, at_s, body = json.loads(line)
        return cls(index, at_s, body.encode("utf-8"))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the time of each request, in seconds after the start. The gaps have a gamma distribution (burstiness 1:
    Poisson; inf: all gaps are equal); with `rate` inf, all requests start at once. As in vLLM, the gaps are scaled so
    that the last request arrives when the rate says. So the actual rate is exact."""
    if rate == float("inf"):
        return [0.0] * count
    if burstiness == float("inf"):
        return [number / rate for number in range(1, count + 1)]
    numbers, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += numbers.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(at)
    # With a tiny burstiness, all gaps may be too small for a float: then all requests come together, at the end.
    return [time * (count / rate) / at if at else count / rate for time in times]


class Load:
    """Sends the requests of one event loop; `max_concurrency` 0 is no limit."""

    def __init__(self, target: Target, max_concurrency: int = 0) -> None:
        self._target = target
        self._gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._idle: list[StreamConnection] = []

    async def run(self, plan: Sequence[PlannedRequest], begin_s: float) -> list[Outcome]:
        """Send each request at its time, and return the outcomes in the order of these times. `begin_s` is the start of
        the plan, by `perf_counter`. While `max_concurrency` requests are under way, the next request and all after it
        wait. Garbage collection is off meanwhile, and on afterwards. Idle connections are closed at the end."""
        tasks: list[asyncio.Task[Outcome]] = []
        gc.collect()
        gc.disable()
        try:
            for request in sorted(plan, key=lambda request: request.at_s):
                wait_s = begin_s + request.at_s - perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if self._gate is not None:
                    await self._gate.acquire()
                tasks.append(asyncio.create_task(self._send_one(request)))
            return list(await asyncio.gather(*tasks))
        finally:
            gc.enable()
            for connection in self._idle:
                connection.close()

    async def _send_one(self, request: PlannedRequest) -> Outcome:
        """Send one request over an idle connection or a new one, and return its outcome. Its time of sending is that
        before a new connection is made. A connection that fails is an outcome with an error; the request is not sent
        again. Afterwards the connection is kept if it can be used again, and a place of `max_concurrency` is free."""
        outcome = Outcome(index=request.index, sent_s=perf_counter())
        try:
            connection = self._take() or await self._target.connect()
            await connection.send(request.body, outcome)
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
        except OSError as error:
            outcome.fail(f"no connection: {error}")
        finally:
            outcome.set_ended(perf_counter())
            if self._gate is not None:
                self._gate.release()
        return outcome

    def _take(self) -> StreamConnection | None:
        """Take the idle connection that was used last and can be used again; None if there is none. Connections that
        the server has closed are dropped."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None


def outcome_to_json(outcome: Outcome) -> str:
    """Encode an outcome as one line."""
    return json.dumps(asdict(outcome))


def outcome_from_json(line: str) -> Outcome:
    """Decode what `outcome_to_json` encoded."""
    return Outcome(**json.loads(line))
