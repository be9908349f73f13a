"""Canaries: requests of which each has a mark of its own in its prompt, and an answer that no other prompt has.

The paced worker makes tokens of what lies in a prompt's KV pages. So an answer tells whose pages were read: a request
that got a page, a slot's state, a token or a message of another one has another answer than its own prompt's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire import AsyncClient, QuireError, SamplingParams
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts

_FIRST_ID = 300
# Lengths in tokens: of the beginning that several canaries share, and with it pages; and of the mark.
_SHARED, _MARK = (0, 16, 64, 200), 12
_TOKENS = (8, 40)
# Answers that a crossed one is compared with, to tell whose it is.
_REMEMBERED = 2000


@dataclass(frozen=True)
class Canary:
    """One request. `answer` is that of its prompt alone."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    answer: tuple[int, ...]


class Canaries:
    """`streams` clients ask one canary after the other, from `run` on until that task is cancelled."""

    def __init__(self, address: str, streams: int, seed: int) -> None:
        self.answered = 0
        # Errors that clients saw, and answers that belong to another request.
        self.errors: list[str] = []
        self.crossed: list[str] = []
        self._address, self._streams = address, streams
        self._rng = random.Random(seed)
        self._facts = read_facts(str(find_model(None)))
        shared = max(_SHARED)
        self._beginnings = [tuple(self._tokens(shared)) for _ in range(3)]
        self._made: deque[Canary] = deque(maxlen=_REMEMBERED)
        self._count = 0

    async def run(self) -> None:
        """Ask for ever. A task's work."""
        async with AsyncClient(self._address) as client, asyncio.TaskGroup() as tasks:
            for _ in range(self._streams):
                tasks.create_task(self._ask_on(client))

    def make(self) -> Canary:
        """The next canary: no other one has its mark."""
        rng = self._rng
        shared = rng.choice(self._beginnings)[: rng.choice(_SHARED)]
        # The number as digits of a base makes the mark unique, whatever the generator says.
        number, base = self._count, self._facts.vocab_size - _FIRST_ID
        mark = (_FIRST_ID + number // base % base, _FIRST_ID + number % base, *self._tokens(_MARK))
        self._count += 1
        prompt = (*shared, *mark)
        temperature, seed = rng.choice(((0.0, 0), (0.8, rng.getrandbits(31))))
        count = rng.randint(*_TOKENS)
        sampling = Sampling(temperature=temperature, seed=seed)
        answer = paced_tokens(list(prompt), Stop(count, ignore_eos=True), sampling, facts=self._facts).tokens
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True)
        canary = Canary(number, prompt, params, tuple(answer))
        self._made.append(canary)
        return canary

    def judge(self, canary: Canary, prompt: list[int], tokens: list[int]) -> None:
        """Note an answer that is not the canary's own, and whose it is if that is known. `prompt` is what the answer
        says that it was asked."""
        self.answered += 1
        if tuple(tokens) == canary.answer and tuple(prompt) == canary.prompt:
            return
        of = [other.number for other in self._made if other.answer[: len(tokens)] == tuple(tokens)]
        self.crossed.append(f"canary {canary.number} got {tokens}, the answer of {of or 'nobody known'}")

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(_FIRST_ID, self._facts.vocab_size) for _ in range(count)]

    async def _ask_on(self, client: AsyncClient) -> None:
        while True:
            canary, tokens, prompt = self.make(), list[int](), list[int]()
            request_id = f"canary-{canary.number}"
            try:
                deltas = client.generate(
                    list(canary.prompt), canary.params, return_token_ids=True, request_id=request_id
                )
                async for delta in deltas:
                    tokens += delta.token_ids
                    prompt = prompt or list(delta.prompt_token_ids)
            except QuireError as error:
                self.errors.append(f"canary {canary.number}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
                continue
            self.judge(canary, prompt, tokens)


@contextlib.asynccontextmanager
async def asking(canaries: Canaries) -> AsyncIterator[None]:
    """The canaries ask while this lasts."""
    task = asyncio.create_task(canaries.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
