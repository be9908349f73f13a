"""A wait that the end of a discovery cuts short."""

from __future__ import annotations

import asyncio


class Closing:
    """Set once; whoever pauses on it wakes."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether the end has come."""
        return self._event.is_set()

    def set(self) -> None:
        """The end."""
        self._event.set()

    async def pause(self, seconds: float | None) -> bool:
        """Wait so long, or for ever if None, or until the end. Returns whether the end has come."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
