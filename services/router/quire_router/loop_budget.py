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
    """Lets through at most `most_values` values per turn of the loop, or one larger piece. Work that does not fit waits
    for a later turn, in order. A call that need not wait counts with the turn before, if `_renew` is still to run in
    this turn."""

    def __init__(self, most_values: int = MOST_VALUES) -> None:
        self._most_values = most_values
        # The values of this turn, and those of calls that were let in and run in the next turn. `_renew` is scheduled
        # while one of the two is not 0.
        self._spent = self._spent_next = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, values: int) -> None:
        """Return at once if this turn of the loop has room for this many values and no earlier call waits. Otherwise
        return in a later turn that has room, in the order of the calls. A call for more than a whole budget gets the
        budget of a turn for itself."""
        if not self._waiting and not self._spent_next and self._fits(values, self._spent):
            if values and not self._spent:
                asyncio.get_running_loop().call_soon(self._renew)
            self._spent += values
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((values, turn))
        await turn

    def _fits(self, values: int, spent: int) -> bool:
        return not spent or spent + values <= self._most_values

    def _renew(self) -> None:
        """Begin the budget of this turn. It starts with the calls that the last run has let in, because they run in
        this turn. Then let in as many waiting calls as the next turn has room for."""
        self._spent, self._spent_next = self._spent_next, 0
        while self._waiting and self._fits(self._waiting[0][0], self._spent_next):
            values, turn = self._waiting.popleft()
            if not turn.done():  # the request was not cancelled meanwhile
                self._spent_next += values
                turn.set_result(None)
        if self._spent or self._spent_next:
            asyncio.get_running_loop().call_soon(self._renew)
