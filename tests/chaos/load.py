"""Load: streams that ask script after script, over HTTP and gRPC, and compare every answer with the undisturbed one."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from quire import AsyncClient, QuireError
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts
from tests.chaos.rig import Rig
from tests.chaos.scripts import Script, with_stop

# What was sent before a fault is heard for so long after it.
_ON_THE_WAY_S = 0.1


@dataclass
class Answer:
    """All that must be equal between two runs of a script."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int] | None = None

    def difference(self, other: Answer) -> str:
        """Empty where they are equal; else where they part."""
        if self == other:
            return ""
        for place, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != theirs:
                return f"token {place} is {mine} instead of {theirs}; {self._length(other)}"
        for name in ("finish", "usage", "prompt_tokens", "text"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(self, name)!r} instead of {getattr(other, name)!r}; {self._length(other)}"
        return self._length(other)

    def _length(self, other: Answer) -> str:
        return f"{len(self.tokens)} tokens instead of {len(other.tokens)}"


class Ticks:
    """When something was heard on a stream, or asked for: the gaps between are what a client waits."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def tick(self) -> None:
        self.times.append(time.monotonic())

    def pause_after(self, moment: float) -> float:
        """From the moment to the end of the longest gap then, or soon after it, since tokens may be on their way.

        0 where nothing was waited for.
        """
        pairs = zip(self.times, self.times[1:], strict=False)
        gaps = [(b - a, b) for a, b in pairs if a < moment + _ON_THE_WAY_S and b > moment]
        return max(gaps)[1] - moment if gaps else 0.0


async def over_grpc(client: AsyncClient, script: Script, ticks: Ticks) -> Answer:
    """Ask by the public gRPC contract."""
    answer = Answer()
    async for delta in client.generate(script.prompt, script.params(), return_token_ids=True):
        ticks.tick()
        answer.text += delta.text
        answer.tokens.extend(delta.token_ids)
        answer.prompt_tokens.extend(delta.prompt_token_ids)
        answer.finish = delta.finish_reason or answer.finish
        if delta.usage is not None:
            answer.usage = (delta.usage.prompt_tokens, delta.usage.completion_tokens)
    return answer


async def over_http(http: httpx.AsyncClient, script: Script, ticks: Ticks) -> Answer:
    """Ask by OpenAI's API, streamed. Raises RuntimeError for what a client would call an error."""
    answer, done = Answer(), False
    async with http.stream("POST", "/v1/completions", json=script.body()) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            ticks.tick()
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"error in the stream: {chunk['error']}")
            if chunk.get("usage"):
                answer.usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
            for choice in chunk["choices"]:
                answer.text += choice["text"]
                answer.tokens.extend(choice.get("token_ids") or ())
                answer.prompt_tokens.extend(choice.get("prompt_token_ids") or ())
                answer.finish = choice["finish_reason"] or answer.finish
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return answer


class Load:
    """Streams of even numbers speak HTTP, the others gRPC."""

    def __init__(self, rig: Rig, streams: int, seed: int) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self.tokens = 0
        self.ticks = [Ticks() for _ in range(streams)]
        self.expected: dict[Script, Answer] = {}
        self._rig = rig
        self._rng = random.Random(seed)
        self._ending = asyncio.Event()
        self._began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self, scripts: Sequence[Script]) -> None:
        """What each script is answered while nothing disturbs; every third gets a stop string out of its own answer."""
        async with AsyncClient(self._rig.stack.grpc) as client:
            answers = await asyncio.gather(*(over_grpc(client, script, Ticks()) for script in scripts))
            stopped = [with_stop(s, a.text) for s, a in zip(scripts, answers, strict=True) if s.number % 3 == 2]
            cut = await asyncio.gather(*(over_grpc(client, script, Ticks()) for script in stopped))
        self._check_paced(dict(zip(scripts, answers, strict=True)))
        plain = {s: a for s, a in zip(scripts, answers, strict=True) if s.number % 3 != 2}
        self.expected = {**plain, **dict(zip(stopped, cut, strict=True))}
        assert all(answer.finish and answer.usage for answer in self.expected.values())
        assert any(answer.finish == "stop" for answer in cut)

    def _check_paced(self, answers: Mapping[Script, Answer]) -> None:
        """What the paced worker answers is known without asking."""
        if not self._rig.engine.startswith("paced"):
            return
        facts = read_facts(str(find_model(None)))
        for script, answer in answers.items():
            sampling = Sampling(temperature=script.temperature, seed=script.seed)
            pure = paced_tokens(answer.prompt_tokens, Stop(script.max_tokens), sampling, facts=facts)
            assert answer.tokens == pure.tokens, script

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
        rng, ticks = random.Random(self._rng.random()), self.ticks[number]
        scripts = list(self.expected)
        async with AsyncClient(self._rig.stack.grpc) as client:
            while not self._ending.is_set():
                script = rng.choice(scripts)
                began = self.at()
                ticks.tick()
                try:
                    if number % 2:
                        answer = await over_grpc(client, script, ticks)
                    else:
                        answer = await over_http(self._rig.http, script, ticks)
                except (QuireError, RuntimeError, httpx.HTTPError) as error:
                    self._fail(number, script, began, f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.2)
                    continue
                self.answers += 1
                self.tokens += len(answer.tokens)
                difference = answer.difference(self.expected[script])
                if difference:
                    self._fail(number, script, began, difference)

    def _fail(self, number: int, script: Script, began: str, why: str) -> None:
        kind = "gRPC" if number % 2 else "HTTP"
        self.failures.append(f"stream {number} ({kind}), {script}, {began} to {self.at()}: {why}")
