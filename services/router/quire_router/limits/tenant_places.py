"""The places that one tenant holds in this router, and the requests that wait until Redis has decided about their
places. One place is one sequence.

Makes no calls to Redis. A request that is cancelled gives up its places at once; a later decision does not change that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from quire_router.limits.return_rate import ReturnRate

if TYPE_CHECKING:
    from collections.abc import Sequence


class WaitingRequest:
    """A request that asks for `places` of `limit`. The result of `decided` is None if the request is admitted;
    otherwise it is the number of places that other routers hold."""

    __slots__ = ("decided", "limit", "places")

    def __init__(self, places: int, limit: int) -> None:
        self.places = places
        self.limit = limit
        self.decided: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()


class TenantPlaces:
    """The places of one tenant. `held` is the number of places that admitted requests hold. `asked` is the number of
    places for which requests wait."""

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
        """Whether Redis must be called, because it may not know the number of held places (they have changed, or the
        last call failed), or because a request waits."""
        return self._untold or bool(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any place is held, or Redis must be called."""
        return self.held > 0 or self.untold

    def add(self, places: int) -> None:
        """Add so many places to those that are held; a negative number gives places back. Redis must be told later."""
        self.held += places
        self.mark_untold()

    def mark_untold(self) -> None:
        """Note that Redis must be told how many places are held."""
        self._untold = True
        self._changed.set()

    async def wait_for(self, places: int, limit: int) -> int | None:
        """Ask for places, and wait until the task that calls Redis has decided. Returns None if the request is admitted
        and holds the places; otherwise returns the number of places that other routers hold. A cancelled call gives up
        its places, even if they were granted."""
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
        """Return the requests that wait, in their order and without cancelled ones, for one call to Redis that also
        says how many places are held. Redis counts as told from now on. After the call, call `decide` or
        `admit_all`."""
        self._asking = [request for request in self._waiting if not request.decided.done()]
        self._waiting, self._untold = [], False
        return self._asking

    def decide(self, admitted: Sequence[bool], others: int) -> None:
        """End the wait of the requests that `take_waiting` returned. `admitted` has the answer of Redis for each: an
        admitted request holds its places; any other gets `others`, the places of other routers. If Redis has admitted a
        request that was cancelled, Redis must be told again."""
        asking, self._asking = self._asking, []
        for request, admits in zip(asking, admitted, strict=True):
            if request.decided.done():
                if admits:
                    self.mark_untold()  # Redis counts the places of a request that was cancelled
            else:
                self._end(request, admits=admits, others=others)

    def admit_all(self) -> None:
        """Decide without Redis about all requests that wait, also about those in a call to Redis. Each request that
        fits below its limit by the count of this router is admitted; the others are refused. Redis must be told
        later."""
        waiting, self._asking, self._waiting = [*self._asking, *self._waiting], [], []
        for request in waiting:
            if not request.decided.done():
                self._end(request, admits=self.held + request.places <= request.limit, others=0)
                self.mark_untold()

    async def changed(self, timeout_s: float) -> None:
        """Wait until places have changed or a request asks for some, or until `timeout_s` has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    def _end(self, request: WaitingRequest, *, admits: bool, others: int) -> None:
        """End the wait of a request with its decision. An admitted request holds its places from now on; a refused one
        gets `others`."""
        self.asked -= request.places
        if admits:
            self.held += request.places
        request.decided.set_result(None if admits else others)

    def _abandon(self, request: WaitingRequest) -> None:
        """Give up the places of a request whose call was cancelled: those that it asks for, or those that it was
        granted in the meantime."""
        if request.decided.cancelled():
            self.asked -= request.places
        elif request.decided.result() is None:
            self.add(-request.places)
