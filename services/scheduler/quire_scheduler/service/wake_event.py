"""Wakes everybody who waits, each time it rings. For watchers that look for themselves what has changed."""

from __future__ import annotations

import asyncio


class WakeEvent:
    """One loop's. A ring between two waits is missed, so look before waiting."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until the next ring; False where the time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
