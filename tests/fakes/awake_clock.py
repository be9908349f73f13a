"""AwakeClock: how long something took of the time in which this loop ran. What all wait for alike does not count."""

from __future__ import annotations

import asyncio
from typing import Self

_TICK_S = 0.02


class AwakeClock:
    """A context. A tick that comes late adds no more than one that is twice as long as it should be."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = loop.time()
            self.passed_s += min(now_s - last_s, 2 * _TICK_S)
            last_s = now_s
