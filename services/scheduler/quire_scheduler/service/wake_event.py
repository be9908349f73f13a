"""WakeEvent: wakes all waiters each time it is set. Watchers look for themselves what has changed."""

from __future__ import annotations

import asyncio


class WakeEvent:
    """Belongs to one event loop. A `set` between two waits is missed, so look before you wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake all present waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next `set`; False if the time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
