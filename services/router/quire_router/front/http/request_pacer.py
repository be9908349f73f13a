"""RequestPacer: lets the requests of a burst in a few at a time, in the order of arrival. Between two groups, the event
loop runs other tasks.

Without it, the loop would read and parse every request of a burst before it sends the first of them to the engine. The
engine, and the tokens of all running requests, would wait for the last request of the burst. The first request goes
alone, so that the engine begins at once. Then each turn lets in twice as many, because a message with several requests
costs less per request. This module knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST_AT_ONCE = 4


class RequestPacer:
    """The pacer of one event loop. A request that comes alone does not wait."""

    def __init__(self) -> None:
        # How many the last turn let in; 0: nobody is about to come in.
        self._let_in = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when the request may proceed: at once if no burst is under way, else in the order of arrival. The
        request that proceeds at once starts the turns that let later ones in."""
        loop = asyncio.get_running_loop()
        if self._let_in:
            turn = loop.create_future()
            self._queue.append(turn)
            await turn
        else:
            self._let_in = 1
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Let in twice as many waiting requests as the last turn did, four at most. Calls itself in the loop's next
        turn, until no request waits."""
        most, let_in = min(2 * self._let_in, MOST_AT_ONCE), 0
        while self._queue and let_in < most:
            turn = self._queue.popleft()
            if not turn.done():  # else who waited was cancelled
                turn.set_result(None)
                let_in += 1
        self._let_in = let_in
        if let_in:
            asyncio.get_running_loop().call_soon(self._turn)
