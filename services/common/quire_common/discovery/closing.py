"""Closing: an event that ends the waits of a discovery."""

from __future__ import annotations

import asyncio


class Closing:
    """An event that is set once and wakes every task that pauses on it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether the event is set."""
        return self._event.is_set()

    def set(self) -> None:
        """Set the event."""
        self._event.set()

    async def pause(self, seconds: float | None) -> bool:
        """Wait for the event, for `seconds` at most (None: without limit). Returns whether the event is set."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
