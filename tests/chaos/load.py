"""Load: streams that ask script after script, over HTTP and gRPC, and compare every answer with the undisturbed one.

Some leave in the middle of an answer, as clients do.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

import httpx

from quire import AsyncClient, QuireError
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.answer import Answer, Ticks, over_grpc, over_http
from tests.chaos.rig import Rig
from tests.chaos.scripts import Script, with_stop

# Of the answers, how many are left before their end.
_LEAVE_SHARE = 0.08
# Of the transports: odd streams speak gRPC, even ones HTTP.
_HTTP, _GRPC = 0, 1


class Load:
    """Streams of even numbers speak HTTP, the others gRPC."""

    def __init__(self, rig: Rig, streams: int, seed: int) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self.left = 0
        self.tokens = 0
        self.ticks = [Ticks() for _ in range(streams)]
        self._expected: dict[tuple[Script, int], Answer] = {}
        self._scripts: list[Script] = []
        self._rig = rig
        self._rng = random.Random(seed)
        self._ending = asyncio.Event()
        self._began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self, scripts: Sequence[Script]) -> None:
        """What each script is answered while nothing disturbs; every third gets a stop string out of its own answer."""
        plain = [script for script in scripts if script.number % 3 != 2]
        free = [script for script in scripts if script.number % 3 == 2]
        async with AsyncClient(self._rig.stack.grpc) as client:

            async def ask(wanted: Sequence[Script], transport: int) -> dict[tuple[Script, int], Answer]:
                asked = (self._ask(client, script, transport, Ticks()) for script in wanted)
                answers = dict(zip(((s, transport) for s in wanted), await asyncio.gather(*asked), strict=True))
                self._check_paced(answers)
                assert all(answer.complete for answer in answers.values())
                return answers

            longer = await ask(free, _GRPC)
            cut = [with_stop(script, longer[script, _GRPC].texts[0]) for script in free]
            self._scripts = [*plain, *cut]
            for transport in (_HTTP, _GRPC):
                self._expected |= await ask(self._scripts, transport)
        assert any("stop" in self._expected[script, _GRPC].finishes.values() for script in cut)

    def learned(self, other: Load) -> None:
        """What another one has learned of another stack, whose answers this one's must be."""
        self._scripts, self._expected = other._scripts, other._expected

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
                script, began = rng.choice(self._scripts), self.at()
                leave_after = rng.randrange(script.max_tokens) if rng.random() < _LEAVE_SHARE else -1
                ticks.tick()
                try:
                    answer = await self._ask(client, script, transport, ticks, leave_after)
                except (QuireError, RuntimeError, httpx.HTTPError) as error:
                    self._fail(number, script, began, f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.2)
                    continue
                self.tokens += answer.count
                if answer.left:
                    self.left += 1
                    continue
                self.answers += 1
                difference = answer.difference(self._expected[script, transport])
                if difference:
                    self._fail(number, script, began, difference)

    async def _ask(
        self, client: AsyncClient, script: Script, transport: int, ticks: Ticks, leave_after: int = -1
    ) -> Answer:
        if transport == _GRPC:
            return await over_grpc(client, script, ticks, leave_after)
        return await over_http(self._rig.http, script, ticks, leave_after)

    def _check_paced(self, answers: Mapping[tuple[Script, int], Answer]) -> None:
        """What the paced worker answers is known without asking."""
        if not self._rig.engine.startswith("paced"):
            return
        facts = read_facts(str(find_model(None)))
        for (script, _), answer in answers.items():
            for index, tokens in answer.tokens.items():
                sampling = Sampling(temperature=script.temperature, seed=script.seed, sample=index)
                pure = paced_tokens(answer.prompt_tokens, Stop(script.max_tokens), sampling, facts=facts)
                assert tokens == pure.tokens[: len(tokens)], script
                assert script.stop or tokens == pure.tokens, script

    def _fail(self, number: int, script: Script, began: str, why: str) -> None:
        kind = "gRPC" if number % 2 == _GRPC else "HTTP"
        self.failures.append(f"stream {number} ({kind}), {script}, {began} to {self.at()}: {why}")
