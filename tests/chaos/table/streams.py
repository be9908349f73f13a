"""Streams: sixteen clients of the routers behind Envoy, half by HTTP and half by gRPC, that ask script after script."""

from __future__ import annotations

import asyncio
import random
import time
from types import TracebackType
from typing import Self

import httpx

from quire import AsyncClient, QuireError, Unavailable
from tests.chaos.answer import Ticks
from tests.chaos.references import GRPC, References, ask
from tests.chaos.scripts import Script
from tests.chaos.table.table_rig import TableRig

STREAMS = 16
_LIMIT_S = 90.0
_PAUSE_S = 0.1
_POLL_S = 0.02


class Streams:
    """A context: they ask while it lasts; at its end each hears its present answer out.

    `routers_end`: a router ends in this round. Its own HTTP streams then break, and so do calls of gRPC that have heard
    nothing yet; their clients ask again, which is counted and is no error.
    """

    def __init__(self, rig: TableRig, references: References, seed: str, *, routers_end: bool) -> None:
        self.answers = self.asked_again = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        # Of every answer so far, and of those that are under way, by stream.
        self._ticks: list[list[Ticks]] = [[] for _ in range(STREAMS)]
        self._rig, self._references, self._routers_end = rig, references, routers_end
        self._seed = seed
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        self._http = httpx.AsyncClient(base_url=self._rig.envoy.url, trust_env=False, timeout=_LIMIT_S)
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(STREAMS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        try:
            _, late = await asyncio.wait(self._tasks, timeout=_LIMIT_S)
            self.errors += [f"a stream did not end within {_LIMIT_S} s" for _ in late]
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self._http.aclose()

    async def wait_for_answers(self) -> None:
        """Wait until every stream has received something."""
        async with asyncio.timeout(_LIMIT_S):
            while not all(any(ticks.times for ticks in stream) for stream in self._ticks):
                await asyncio.sleep(_POLL_S)

    def longest_pause_s(self, moment: float) -> float:
        """From the moment until the last of the streams went on that were being answered then."""
        pauses = [
            ticks.pause_after(moment)
            for stream in self._ticks
            for ticks in stream
            if ticks.times and ticks.times[0] <= moment
        ]
        return max(pauses, default=0.0)

    async def _ask_on(self, number: int) -> None:
        rng, transport = random.Random(f"{self._seed} {number}"), number % 2
        async with AsyncClient(self._rig.envoy.grpc) as client:
            while not self._ending.is_set():
                script = rng.choice(self._references.scripts)
                while not await self._one(client, script, number, transport):
                    await asyncio.sleep(_PAUSE_S)

    async def _one(self, client: AsyncClient, script: Script, number: int, transport: int) -> bool:
        """Ask, and judge the answer; False: it is to be asked again."""
        began, ticks = time.monotonic() - self._began, Ticks()
        self._ticks[number].append(ticks)
        where = f"stream {number} ({'gRPC' if transport == GRPC else 'HTTP'}), {script}, from {began:.2f} s"
        try:
            answer = await ask(client, self._http, script, transport, ticks)
        except (QuireError, RuntimeError, httpx.HTTPError) as error:
            if self._routers_end and _broken(error):
                self.asked_again += 1
                return False
            self.errors.append(f"{where} to {time.monotonic() - self._began:.2f} s: {type(error).__name__}: {error}")
            await asyncio.sleep(_PAUSE_S)
            return True
        self.answers += 1
        if difference := self._references.difference(script, transport, answer):
            self.wrong.append(f"{where}: {difference}")
        return True


def _broken(error: Exception) -> bool:
    """Whether the connection ended, rather than an answer told of a failure."""
    if isinstance(error, Unavailable):
        return error.code == "UNREACHABLE"
    return isinstance(error, httpx.TransportError) or "without [DONE]" in str(error)
