"""Load: streams that ask script after script, over HTTP and gRPC, and compare every answer with the undisturbed one.

Some leave in the middle of an answer, as clients do.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import httpx

from quire import AsyncClient, QuireError
from tests.chaos.answer import Ticks
from tests.chaos.references import GRPC, References, ask
from tests.chaos.rig import Rig
from tests.chaos.scripts import Script

# Of the answers, how many are left before their end.
_LEAVE_SHARE = 0.08


class Load:
    """Streams of even numbers speak HTTP, the others gRPC."""

    def __init__(self, rig: Rig, streams: int, seed: int, references: References | None = None) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self.left = 0
        self.tokens = 0
        self.ticks = [Ticks() for _ in range(streams)]
        # What every answer must be: learned of this stack, unless given.
        self.references = references or References()
        self._rig = rig
        self._rng = random.Random(seed)
        self._ending = asyncio.Event()
        self._began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self, scripts: Sequence[Script]) -> None:
        """What each script is answered while nothing disturbs."""
        async with AsyncClient(self._rig.stack.grpc) as client:
            await self.references.learn(scripts, client, self._rig.http, self._rig.engine)

    def start(self) -> None:
        self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(len(self.ticks))]

    async def finish(self) -> None:
        """Let every stream end its present answer."""
        self._ending.set()
        await asyncio.gather(*self._tasks)

    def at(self, moment: float | None = None) -> str:
        """A point in time as failures and faults tell it."""
        return f"{(moment or time.monotonic()) - self._began:7.2f} s"

    async def _stream(self, number: int) -> None:
        rng, ticks, transport = random.Random(self._rng.random()), self.ticks[number], number % 2
        async with AsyncClient(self._rig.stack.grpc) as client:
            while not self._ending.is_set():
                script, began = rng.choice(self.references.scripts), self.at()
                leave_after = rng.randrange(script.max_tokens) if rng.random() < _LEAVE_SHARE else -1
                ticks.tick()
                try:
                    answer = await ask(client, self._rig.http, script, transport, ticks, leave_after)
                except (QuireError, RuntimeError, httpx.HTTPError) as error:
                    self._fail(number, script, began, f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.2)
                    continue
                self.tokens += answer.count
                if answer.left:
                    self.left += 1
                    continue
                self.answers += 1
                difference = self.references.difference(script, transport, answer)
                if difference:
                    self._fail(number, script, began, difference)

    def _fail(self, number: int, script: Script, began: str, why: str) -> None:
        kind = "gRPC" if number % 2 == GRPC else "HTTP"
        self.failures.append(f"stream {number} ({kind}), {script}, {began} to {self.at()}: {why}")
