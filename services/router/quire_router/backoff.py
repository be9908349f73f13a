"""Backoff: waits longer after each failure, with jitter, so that clients do not overload a peer that comes back."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """A delay that doubles from `first_s` to `most_s`. Call `reset` after a success."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """Begin again at `first_s`, because the peer has answered."""
        self._next_s = self._first_s

    def next_delay_s(self) -> float:
        """Return a random delay between half of the present delay and all of it. Then double the present delay, up to
        `most_s`."""
        step, self._next_s = self._next_s, min(self._most_s, self._next_s * 2)
        return step * random.uniform(0.5, 1.0)

    async def wait(self) -> None:
        """Sleep for the next delay."""
        await asyncio.sleep(self.next_delay_s())
