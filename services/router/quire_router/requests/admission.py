"""Bounds the number of sequences that are in flight in this router process. A request beyond the bound is refused at
once. This module knows nothing of what the requests contain."""

from __future__ import annotations

import asyncio

from quire_common.errors import InvalidArgument, Overloaded, Unavailable, spread_retry_s
from quire_router.limits.return_rate import ReturnRate

_RETRY_AFTER_S = 1.0
# A refused request is told to retry when its own places and this share of all places will have been given back.
_PLACE_SHARE = 0.1


class Admission:
    """Counts the places that are taken, up to a limit. One place is one sequence. `inside` is the number of places that
    are taken; while `open` is False, every request is refused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open = True
        self._idle = asyncio.Event()
        self._idle.set()
        self.inside = 0
        self._returned = ReturnRate()

    def enter(self, weight: int) -> None:
        """Take `weight` places, one per sequence. Raises Unavailable while admission is paused, InvalidArgument if
        `weight` exceeds the limit, and Overloaded if too few places are free. The retry time of Overloaded follows from
        the rate at which places were given back lately."""
        if not self.open:
            raise Unavailable(
                "DRAINING",
                "This router takes no new requests.",
                "Retry, on another router.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if weight > self._limit:
            raise InvalidArgument(
                "TOO_MANY_SEQUENCES",
                f"The request asks for {weight} sequences; this router runs {self._limit} at most.",
                "Lower n, or split the list of prompts.",
                param="n",
            )
        if self.inside + weight > self._limit:
            raise Overloaded(
                "TOO_MANY_REQUESTS",
                f"{self.inside} of {self._limit} sequences are in flight.",
                "Retry after the given time, or raise --max-concurrent-requests.",
                retry_after_s=spread_retry_s(self._returned.time_for_s(weight + self._limit * _PLACE_SHARE)),
            )
        self.inside += weight
        self._idle.clear()

    def leave(self, weight: int, *, ran: bool = True) -> None:
        """Give `weight` places back; the last one ends the wait of `close`. Without `ran`, the request never ran, so
        these places do not count in the rate for retry times."""
        self.inside -= weight
        if ran:
            self._returned.add(weight)
        if self.inside == 0:
            self._idle.set()

    def pause(self) -> None:
        """Stop admitting; sequences that were admitted go on."""
        self.open = False

    def resume(self) -> None:
        """Admit again."""
        self.open = True

    async def close(self, timeout_s: float) -> None:
        """Stop admitting; return when all places are given back, or after the timeout."""
        self.pause()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return
