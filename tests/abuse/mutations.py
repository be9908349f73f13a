"""Ways to break a service on purpose, each of which the harness must notice. Applied before the service begins."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

_MIB = 1 << 20


def slow_callback(service: str) -> None:
    """A tokenizer computes 80 ms in one callback for each text that it encodes."""
    if service == "tokenizer":
        from quire_tokenizer.servicer import TokenizerServicer

        _before(TokenizerServicer, "_tokenize", lambda: _burn(0.08))


def hoarding(service: str) -> None:
    """A router keeps 2 MiB for each request."""
    if service == "router":
        from quire_router.front.http.generate import GenerateEndpoint

        kept: list[bytes] = []
        _before(GenerateEndpoint, "__call__", lambda: kept.append(b"x" * (2 * _MIB)))


def stalling(service: str) -> None:
    """A router that gets a dozen requests in a second sleeps for one in its loop: no processor time, but all wait."""
    if service == "router":
        from quire_router.front.http.generate import GenerateEndpoint

        times: list[float] = []

        def stall() -> None:
            now = time.monotonic()
            times[:] = [*(each for each in times if now - each < 1.0), now]
            if len(times) >= 12:
                times.clear()
                time.sleep(1.0)

        _before(GenerateEndpoint, "__call__", stall)


def _before(cls: type, name: str, act: Callable[[], object]) -> None:
    method = getattr(cls, name)
    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*arguments: Any) -> Any:
            act()
            return await method(*arguments)

        setattr(cls, name, awaited)
        return

    @functools.wraps(method)
    def called(*arguments: Any) -> Any:
        act()
        return method(*arguments)

    setattr(cls, name, called)


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


MUTATIONS: dict[str, Callable[[str], None]] = {
    "slow-callback": slow_callback,
    "hoarding": hoarding,
    "stalling": stalling,
}
