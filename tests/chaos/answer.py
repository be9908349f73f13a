"""One answer of a stream as its client got it, over HTTP or gRPC, when its pieces came, and where two answers part."""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, cast

import httpx

from quire import AsyncClient
from quire.outputs import Delta
from tests.chaos.scripts import Script

# What was sent before a fault is heard for so long after it.
_ON_THE_WAY_S = 0.1


@dataclass
class Answer:
    """All that must be equal between two runs of a script over one transport; by the index of the choice."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    # As the transport tells them.
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    # Its client did not wait for the end.
    left: bool = False

    def add(self, index: int, text: str, tokens: list[int], finish: str | None, logprobs: list[Any]) -> None:
        """Take in a piece of a choice."""
        self.texts[index] = self.texts.get(index, "") + text
        self.tokens.setdefault(index, []).extend(tokens)
        self.logprobs.setdefault(index, []).extend(logprobs)
        if finish is not None:
            if index in self.finishes:
                raise RuntimeError(f"choice {index} ended twice")
            self.finishes[index] = finish

    @property
    def complete(self) -> bool:
        return self.usage is not None and self.finishes.keys() == self.texts.keys()

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    def difference(self, other: Answer) -> str:
        """Empty where they are equal; else where they part."""
        for name in ("tokens", "logprobs"):
            for index, theirs in getattr(other, name).items():
                mine = getattr(self, name).get(index, [])
                for place, (one, another) in enumerate(zip(mine, theirs, strict=False)):
                    if one != another:
                        return f"choice {index}, {name}[{place}] of {len(mine)} is {one} instead of {another}"
                if len(mine) != len(theirs):
                    return f"choice {index} has {len(mine)} {name} instead of {len(theirs)}"
        for name in (each.name for each in fields(self)):
            if getattr(self, name) != getattr(other, name):
                return f"{name} is {getattr(self, name)!r} instead of {getattr(other, name)!r}"
        return ""


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
        first = max(0, bisect_right(self.times, moment) - 1)
        last = bisect_left(self.times, moment + _ON_THE_WAY_S, first)
        gaps = [(b - a, b) for a, b in pairwise(self.times[first : last + 1]) if b > moment]
        return max(gaps)[1] - moment if gaps else 0.0


async def over_grpc(client: AsyncClient, script: Script, ticks: Ticks, leave_after: int = -1) -> Answer:
    """Ask by the public gRPC contract; leave after so many tokens, unless that is below 0."""
    answer = Answer()
    deltas = cast("AsyncGenerator[Delta]", client.generate(script.prompt, script.params(), return_token_ids=True))
    async with aclosing(deltas):
        async for delta in deltas:
            ticks.tick()
            logprobs = [(entry.token_id, entry.logprob, entry.candidates) for entry in delta.logprobs]
            answer.add(delta.index, delta.text, list(delta.token_ids), delta.finish_reason, logprobs)
            answer.prompt_tokens = answer.prompt_tokens or list(delta.prompt_token_ids)
            if delta.usage is not None:
                answer.usage = (delta.usage.prompt_tokens, delta.usage.completion_tokens)
            if 0 <= leave_after <= answer.count:
                answer.left = True
                break
    return answer


async def over_http(http: httpx.AsyncClient, script: Script, ticks: Ticks, leave_after: int = -1) -> Answer:
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
                _add_choice(answer, choice)
            if 0 <= leave_after <= answer.count:
                answer.left = True
                return answer
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return answer


def _add_choice(answer: Answer, choice: dict[str, Any]) -> None:
    columns = choice.get("logprobs") or {}
    logprobs = list(zip(*columns.values(), strict=True)) if columns else []
    answer.add(choice["index"], choice["text"], choice.get("token_ids") or [], choice["finish_reason"], logprobs)
    answer.prompt_tokens = answer.prompt_tokens or choice.get("prompt_token_ids") or []
