"""The load of `bench.disaggregation.interference`: streams that decode steadily, and long prompts that keep arriving
beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire import AsyncClient, SamplingParams
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import PacedFacts

_STEADY_PROMPT = 32
# The made-up model draws a token per step whatever the prompt is: these are few.
_LONG_ANSWER = 4
_FIRST_ID = 300


@dataclass(frozen=True)
class LoadShape:
    """The load. Times are seconds. `every_s` is the time between two prompts' arrivals; 0: no prompt arrives."""

    streams: int
    prompt_tokens: int
    every_s: float
    ramp_s: float
    window_s: float


@dataclass
class Heard:
    """Figures in milliseconds: gaps between the events of steady streams, and times from a long prompt's arrival to its
    first token."""

    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    wrong: int = 0


class SteadyLoad:
    """One measurement on one stack. `compared`: every token is compared with the made-up model's answer, according to
    `facts`."""

    def __init__(
        self, address: str, shape: LoadShape, facts: PacedFacts, seed: tuple[int, ...], *, compared: bool
    ) -> None:
        self._address = address
        self._shape = shape
        self._facts = facts
        self._compared = compared
        self._rng = np.random.default_rng(seed)
        self._heard = Heard()
        self._checks: list[Callable[[], bool]] = []
        self._window = (0.0, 0.0)

    async def run(self) -> Heard:
        """Ramp up, measure, and end the load."""
        shape = self._shape
        begin = time.perf_counter() + shape.ramp_s
        self._window = (begin, begin + shape.window_s)
        async with AsyncClient(self._address) as client:
            tasks = [asyncio.create_task(self._steady(client)) for _ in range(shape.streams)]
            arrivals = asyncio.create_task(self._arrivals(client)) if shape.every_s else None
            await asyncio.sleep(shape.ramp_s + shape.window_s)
            if arrivals is not None:
                await arrivals
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        self._heard.wrong = sum(not good() for good in self._checks)
        return self._heard

    async def _steady(self, client: AsyncClient) -> None:
        """Stream answers without end. The gap before each event counts if it lies completely in the window."""
        begin, end = self._window
        while True:
            prompt, tokens, last = self._prompt(_STEADY_PROMPT), list[int](), 0.0
            longest = self._facts.max_model_len - _STEADY_PROMPT
            self._expect(prompt, tokens)
            params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
            async for delta in client.generate(prompt, params, return_token_ids=True):
                now = time.perf_counter()
                if delta.token_ids:
                    tokens += delta.token_ids
                    if last >= begin and now <= end:
                        self._heard.gaps_ms.append((now - last) * 1e3)
                    last = now

    async def _arrivals(self, client: AsyncClient) -> None:
        """Send prompts from the middle of the ramp to the end of the window, at even intervals, whether or not answers
        have come."""
        begin, end = self._window
        tasks, at = list[asyncio.Task[None]](), begin - self._shape.ramp_s / 2
        while at < end:
            await asyncio.sleep(at - time.perf_counter())
            tasks.append(asyncio.create_task(self._long(client, counted=at >= begin)))
            at += self._shape.every_s
        await asyncio.gather(*tasks)

    async def _long(self, client: AsyncClient, *, counted: bool) -> None:
        prompt, tokens, began = self._prompt(self._shape.prompt_tokens), list[int](), time.perf_counter()
        self._expect(prompt, tokens)
        params = SamplingParams(temperature=0.0, max_tokens=_LONG_ANSWER, ignore_eos=True)
        async with contextlib.aclosing(client.generate(prompt, params, return_token_ids=True)) as deltas:  # type: ignore[type-var]  # it is a generator
            async for delta in deltas:
                if counted and delta.token_ids and not tokens:
                    self._heard.first_ms.append((time.perf_counter() - began) * 1e3)
                tokens += delta.token_ids

    def _prompt(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(_FIRST_ID, self._facts.vocab_size, count).tolist()
        return tokens

    def _expect(self, prompt: list[int], tokens: list[int]) -> None:
        """Store an answer, to compare it after the measurement."""
        if not self._compared:
            return

        def good() -> bool:
            stop = Stop(max(len(tokens), 1), ignore_eos=True)
            return tokens == paced_tokens(prompt, stop, Sampling(), facts=self._facts).tokens[: len(tokens)]

        self._checks.append(good)
