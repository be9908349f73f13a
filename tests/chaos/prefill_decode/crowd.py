"""Crowd: requests of one moment, asked together, each of which must get the very tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire import AsyncClient, QuireError, SamplingParams
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import PacedFacts, read_facts
from tests.chaos.rig import Rig

_LIMIT_S = 60.0
_FIRST_ID = 300


@dataclass
class Asked:
    """One request and what came of it."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    # Its client did not wait for the end.
    left: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """Its client goes now; nothing happens where it has its answer."""
        if self.task is not None and not self.task.done():
            self.left = True
            self.task.cancel()

    def wrong(self, facts: PacedFacts) -> bool:
        """Whether any token differs from the undisturbed answer, or some are missing."""
        params = self.params
        sampling = Sampling(temperature=params.temperature, seed=params.seed or 0)
        pure = paced_tokens(self.prompt, Stop(params.max_tokens or 0, ignore_eos=True), sampling, facts=facts).tokens
        return self.tokens != (pure[: len(self.tokens)] if self.left else pure)


class Crowd:
    """A context: the requests run from `ask` on; those that still run when it is left are awaited."""

    def __init__(self, rig: Rig, seed: int, prompt: tuple[int, int] = (600, 1400), answer: tuple[int, int] = (20, 50)):
        self.asked: list[Asked] = []
        self._rng = random.Random(seed)
        self._prompt, self._answer = prompt, answer
        self._client = AsyncClient(rig.stack.grpc)
        self._facts = read_facts(str(find_model(None)))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def ask(self, count: int, leave_after_s: Sequence[float] = ()) -> list[Asked]:
        """So many new requests, half of them greedy. Those with a time leave then, whatever they have."""
        new = [self._a_request() for _ in range(count)]
        for place, one in enumerate(new):
            leave_s = leave_after_s[place] if place < len(leave_after_s) else None
            one.task = asyncio.create_task(self._run(one, leave_s))
            self._tasks.append(one.task)
        self.asked += new
        return new

    async def begun(self, asked: Sequence[Asked]) -> None:
        """Until all of these have a token."""
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*(one.begun.wait() for one in asked))

    async def leave_begun(self, one: Asked) -> None:
        """It leaves once it has a token."""
        await self.begun([one])
        one.leave()

    async def done(self) -> None:
        """Until all have ended. Nothing hangs: a minute is the limit."""
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*self._tasks)

    def errors(self) -> list[str]:
        """That clients saw."""
        return [f"request {number}: {one.error}" for number, one in enumerate(self.asked) if one.error]

    def wrong(self) -> list[str]:
        """Answers that are not the undisturbed ones."""
        answers = [(number, one) for number, one in enumerate(self.asked) if not one.error and one.wrong(self._facts)]
        return [f"request {number} ({len(one.prompt)} tokens, {one.params}): {one.tokens}" for number, one in answers]

    def _a_request(self) -> Asked:
        rng = self._rng
        prompt = [rng.randrange(_FIRST_ID, self._facts.vocab_size) for _ in range(rng.randint(*self._prompt))]
        temperature, seed = rng.choice([(0.0, None), (0.8, rng.getrandbits(31))])
        most = rng.randint(*self._answer)
        return Asked(prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=most, ignore_eos=True))

    async def _run(self, one: Asked, leave_s: float | None) -> None:
        try:
            async with asyncio.timeout(leave_s):
                async for delta in self._client.generate(one.prompt, one.params, return_token_ids=True):
                    one.tokens += delta.token_ids
                    if delta.token_ids:
                        one.begun.set()
        except asyncio.CancelledError:
            if not one.left:
                raise
        except TimeoutError:
            one.left = leave_s is not None
            one.error = "" if one.left else "it took too long"
        except QuireError as error:
            one.error = f"{type(error).__name__}: {error}"
        finally:
            one.begun.set()
