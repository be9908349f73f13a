"""WakeEvent: wakes all waiters each time it is set. It does not say what has changed; waiters look for themselves."""

from __future__ import annotations

import asyncio


class WakeEvent:
    """An event of one event loop. A waiter misses a `set` that comes between two of its waits, so it must look for
    changes, or at `sets`, before it waits."""

    def __init__(self) -> None:
        # The event that the next `set` sets; None until somebody has waited since the last `set`.
        self._event: asyncio.Event | None = None
        self.sets = 0
        """How often it was set."""

    def set(self) -> None:
        """Wake all present waiters."""
        self.sets += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next `set`. Returns True when it comes, False if `timeout_s` ran out before (None: no limit)."""
        event = self._event = self._event or asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
