"""The places that one tenant holds in this router, and the requests that wait until Redis has decided about theirs.

Knows nothing of Redis. A request that is cancelled gives up its place at once, whatever is decided about it later.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from quire_router.limits.return_rate import ReturnRate

if TYPE_CHECKING:
    from collections.abc import Sequence


class WaitingRequest:
    """A request that asks for `places` of `limit`. `decided` becomes None where the request is admitted, and else the
    places that other routers hold."""

    __slots__ = ("decided", "limit", "places")

    def __init__(self, places: int, limit: int) -> None:
        self.places = places
        self.limit = limit
        self.decided: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()


class TenantPlaces:
    """`held`: by requests that were admitted. `asked`: for which requests wait."""

    def __init__(self) -> None:
        self.held = 0
        self.asked = 0
        self.returned = ReturnRate()
        self._waiting: list[WaitingRequest] = []
        self._asking: list[WaitingRequest] = []
        self._untold = False
        self._changed = asyncio.Event()

    @property
    def untold(self) -> bool:
        """Whether Redis does not know what is held, or a request waits."""
        return self._untold or bool(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether anything is held, or to be told to Redis."""
        return self.held > 0 or self.untold

    def add(self, places: int) -> None:
        """Hold so many places more, of which Redis does not know yet; fewer, where the number is negative."""
        self.held += places
        self.mark_untold()

    def mark_untold(self) -> None:
        """Note that Redis does not know what is held."""
        self._untold = True
        self._changed.set()

    async def wait_for(self, places: int, limit: int) -> int | None:
        """Wait until it is decided about the places. Returns None where they are held now, and else how many other
        routers hold."""
        request = WaitingRequest(places, limit)
        self._waiting.append(request)
        self.asked += places
        self._changed.set()
        try:
            return await request.decided
        except BaseException:
            self._abandon(request)
            raise

    def take_waiting(self) -> Sequence[WaitingRequest]:
        """Return the requests that wait, in their order, for one call to Redis that also tells what is held. Then call
        `decide` or `admit_all`."""
        self._asking = [request for request in self._waiting if not request.decided.done()]
        self._waiting, self._untold = [], False
        return self._asking

    def decide(self, admitted: Sequence[bool], others: int) -> None:
        """End the wait of the requests that `take_waiting` returned, as Redis has answered for each of them. `others`:
        what other routers hold."""
        asking, self._asking = self._asking, []
        for request, admits in zip(asking, admitted, strict=True):
            if request.decided.done():
                if admits:
                    self.mark_untold()  # Redis counts places that nobody has
            else:
                self._end(request, admits=admits, others=others)

    def admit_all(self) -> None:
        """Admit all requests that wait, within their limits, without Redis."""
        waiting, self._asking, self._waiting = [*self._asking, *self._waiting], [], []
        for request in waiting:
            if not request.decided.done():
                self._end(request, admits=self.held + request.places <= request.limit, others=0)
                self.mark_untold()

    async def changed(self, timeout_s: float) -> None:
        """Wait until there is something to tell Redis, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    def _end(self, request: WaitingRequest, *, admits: bool, others: int) -> None:
        self.asked -= request.places
        if admits:
            self.held += request.places
        request.decided.set_result(None if admits else others)

    def _abandon(self, request: WaitingRequest) -> None:
        """Give up what a cancelled request has, or asks for."""
        if request.decided.cancelled():
            self.asked -= request.places
        elif request.decided.result() is None:
            self.add(-request.places)
