"""Sixteen streams beside the abuse, half over HTTP, half over gRPC: none may end, and their tokens are known."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from quire import AsyncClient, SamplingParams
from quire.models import find_model
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import read_facts

STREAMS = 16
TOKENS = 160
_LIMIT_S = 120.0


@dataclass
class Heard:
    """Of all streams since the last `take`."""

    gaps_s: list[float] = field(default_factory=list)
    answers: int = 0
    wrong: int = 0
    ended: list[str] = field(default_factory=list)
    """Why streams ended that should not have."""

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s, default=0.0)


class References:
    """A context: the streams run all along, each again when its answer is complete."""

    def __init__(self, http: str, grpc: str, key: str) -> None:
        self._http, self._grpc, self._key = http, grpc, key
        self._heard = Heard()
        facts = read_facts(str(find_model(None)))
        stop = Stop(TOKENS, ignore_eos=True)
        self._prompts = [[300 + (31 * number + place) % 3000 for place in range(24)] for number in range(STREAMS)]
        self._wanted = [paced_tokens(p, stop, Sampling(temperature=0.0), facts=facts).tokens for p in self._prompts]

    async def __aenter__(self) -> References:
        headers = {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.AsyncClient(base_url=self._http, headers=headers, timeout=_LIMIT_S)
        self._rpc = AsyncClient(self._grpc, api_key=self._key)
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(STREAMS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await self._rpc.close()

    def take(self) -> Heard:
        """Return everything that the streams heard since the last call."""
        heard, self._heard = self._heard, Heard()
        return heard

    async def _run(self, number: int) -> None:
        while True:
            try:
                tokens = await (self._by_http(number) if number % 2 else self._by_grpc(number))
            except Exception as error:
                self._heard.ended.append(f"stream {number}: {error!r}"[:300])
                await asyncio.sleep(0.5)
                continue
            self._heard.answers += 1
            self._heard.wrong += tokens != self._wanted[number]

    async def _by_http(self, number: int) -> list[int]:
        body = {"prompt": self._prompts[number], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        tokens, last = list[int](), 0.0
        async with self._client.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}
        ) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    last = self._hear(last)
                    tokens += choice.get("token_ids") or []
        return tokens

    async def _by_grpc(self, number: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens, last = list[int](), 0.0
        async for delta in self._rpc.generate(self._prompts[number], params, return_token_ids=True):
            last = self._hear(last)
            tokens += delta.token_ids
        return tokens

    def _hear(self, last: float) -> float:
        now = time.monotonic()
        if last:
            self._heard.gaps_s.append(now - last)
        return now
