"""LoopBudget: limits the large pieces of work in one turn of the event loop.

`off_loop` is for work that a thread can do. Parts of streamed answers are made on the event loop, and each of them is
short. But when many slow clients read on, or leave, many parts become due at once. Without a common budget, the loop
would make all of them before it serves any other client.
"""

from __future__ import annotations

import asyncio
from collections import deque

from quire_router.off_loop import MOST_VALUES


class LoopBudget:
    """Lets through at most `most_values` values per turn of the loop, or one larger piece. Work that does not fit
    waits, in order. It runs one turn after it was let through, so a turn may have this work and as much new work."""

    def __init__(self, most_values: int = MOST_VALUES) -> None:
        self._most_values = most_values
        self._spent = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, values: int) -> None:
        """Return at once if this turn of the loop has room for this many values and no earlier call waits. Otherwise
        wait for a turn that has room, in the order of the calls, and return in the turn after it. A call for more than
        a whole budget gets the budget of a turn for itself."""
        if not self._waiting and self._fits(values):
            self._spend(values)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((values, turn))
        await turn

    def _fits(self, values: int) -> bool:
        return not self._spent or self._spent + values <= self._most_values

    def _spend(self, values: int) -> None:
        """Add values to those of this turn of the loop. The first ones of a turn schedule `_renew` for the next
        turn."""
        if values and not self._spent:
            asyncio.get_running_loop().call_soon(self._renew)
        self._spent += values

    def _renew(self) -> None:
        """Begin the budget of the next turn, and let in as many waiting calls as it has room for. They run one turn
        later, when this method has already begun the next budget."""
        self._spent = 0
        while self._waiting and self._fits(self._waiting[0][0]):
            values, turn = self._waiting.popleft()
            if not turn.done():  # the request was not cancelled meanwhile
                self._spend(values)
                turn.set_result(None)
