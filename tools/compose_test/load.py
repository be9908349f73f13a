"""Load on a stack: streams that send requests over HTTPS again and again, and compare each answer with the undisturbed
one."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

PROMPTS: Final = tuple(f"{name}:\nMy lord, " for name in ("ROMEO", "JULIET", "KING RICHARD", "NURSE", "GLOUCESTER"))
# Long enough for a prefill replica to be worth it (--pd-least-tokens).
LONG_PROMPT: Final = "\n".join(f"KING HENRY:\nLine {number} of what he says to his lords." for number in range(60))
MAX_TOKENS: Final = 32
_TIMEOUT_S: Final = 120.0
_STREAMS: Final = 3


class Load:
    """Answers are streams of greedy completions, so equal prompts have equal answers."""

    def __init__(self, url: str, ca: str, key: str, *, reconnects: bool, prompts: Sequence[str]) -> None:
        """`reconnects`: a request that got no answer is sent again, as API clients do. This is for stacks with one
        router."""
        context = ssl.create_default_context(cadata=ca)
        self._client = httpx.AsyncClient(
            base_url=url, verify=context, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S
        )
        self._reconnects = reconnects
        self._prompts = prompts
        self._expected: dict[str, str] = {}
        self.answers = 0
        self.reconnected = 0
        self.longest_s = 0.0
        self.errors: list[str] = []

    async def learn(self) -> None:
        """Send each prompt once, while the stack is undisturbed. Raises RuntimeError, httpx.HTTPError."""
        for prompt in self._prompts:
            self._expected[prompt] = await self._ask(prompt)

    async def ask_again(self) -> None:
        """Ask each prompt once more, and compare. Raises RuntimeError, httpx.HTTPError."""
        for prompt in self._prompts:
            self._compare(prompt, await self._ask(prompt))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests all the time. At the end, every stream finishes its present answer."""
        ending = asyncio.Event()
        tasks = [asyncio.create_task(self._stream(ending, number)) for number in range(_STREAMS)]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*tasks)

    async def close(self) -> None:
        await self._client.aclose()

    def taken(self) -> str:
        """Return the counts since the last call, in words."""
        words = f"{self.answers} answers, {len(self.errors)} errors, longest {self.longest_s:.1f} s"
        if self.reconnected:
            words += f", {self.reconnected} connections tried again"
        self.answers, self.reconnected, self.longest_s = 0, 0, 0.0
        return words

    async def _stream(self, ending: asyncio.Event, number: int) -> None:
        while not ending.is_set():
            prompt = self._prompts[number % len(self._prompts)]
            number += 1
            began = time.monotonic()
            try:
                text = await self._ask(prompt)
            except (RuntimeError, httpx.HTTPError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self._compare(prompt, text)

    def _compare(self, prompt: str, text: str) -> None:
        self.answers += 1
        if text != self._expected[prompt]:
            self.errors.append(f"{text!r} is not {self._expected[prompt]!r}")

    async def _ask(self, prompt: str) -> str:
        """Return the whole answer. Raises RuntimeError for an answer that is refused or incomplete, httpx.HTTPError."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            response = await self._begin(body)
            if response is not None:
                try:
                    if response.status_code != 200:
                        raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()[:300]}")
                    return await _text_of(response)
                finally:
                    await response.aclose()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the router has begun no answer for {_TIMEOUT_S} s")
            self.reconnected += 1
            await asyncio.sleep(0.5)

    async def _begin(self, body: dict[str, Any]) -> httpx.Response | None:
        """Return the answer, whose text has yet to come. Returns None if the request must be sent again because the
        only router restarts: the router refuses the connection, closes it without an answer, or answers 503. Raises
        httpx.HTTPError."""
        try:
            response = await self._client.send(
                self._client.build_request("POST", "/v1/completions", json=body), stream=True
            )
        except (httpx.ConnectError, httpx.RemoteProtocolError):
            if not self._reconnects:
                raise
            return None
        if self._reconnects and response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            await response.aclose()
            return None
        return response


async def _text_of(response: httpx.Response) -> str:
    """Return the text of a stream of events. Raises RuntimeError for a stream without an end, or with an error in
    it."""
    text = ""
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return text
        if data.startswith("{"):
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"an error in the stream: {event['error']}")
            text += "".join(choice["text"] for choice in event["choices"])
    raise RuntimeError("the stream has no end")
