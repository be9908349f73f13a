"""How much work may be inside: bounded by sequences, refused early beyond that. Knows nothing of what the work is."""

from __future__ import annotations

import asyncio
import time

from quire_common.errors import InvalidArgument, Overloaded, Unavailable, spread_retry_s

_RETRY_AFTER_S = 1.0
# The rate at which places become free is a mean over about so long.
_HORIZON_S = 10.0
# A refused request should find room when this share of the places, beside its own, was given back.
_PLACE_SHARE = 0.1


class Admission:
    """A counter with a limit and a way to close the door."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open = True
        self._idle = asyncio.Event()
        self._idle.set()
        self.inside = 0
        # Places that were given back lately, and in what time.
        self._left = 0.0
        self._left_s = 0.0
        self._last_left_s = time.monotonic()

    def enter(self, weight: int) -> None:
        """Take `weight` places. Raises Unavailable while closed, InvalidArgument where there are not so many at all,
        and Overloaded where too few are free."""
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
                retry_after_s=spread_retry_s(self._free_in_s(weight + self._limit * _PLACE_SHARE)),
            )
        self.inside += weight
        self._idle.clear()

    def leave(self, weight: int) -> None:
        """Give `weight` places back."""
        self.inside -= weight
        now_s = time.monotonic()
        passed_s = now_s - self._last_left_s
        keep = max(0.0, 1.0 - passed_s / _HORIZON_S)
        self._left, self._left_s = self._left * keep + weight, self._left_s * keep + passed_s
        self._last_left_s = now_s
        if self.inside == 0:
            self._idle.set()

    def pause(self) -> None:
        """Stop admitting; those inside go on."""
        self.open = False

    def resume(self) -> None:
        """Admit again."""
        self.open = True

    async def close(self, timeout_s: float) -> None:
        """Stop admitting; return when all have left, or after the timeout."""
        self.pause()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return

    def _free_in_s(self, places: float) -> float:
        """Return how long it takes until so many places are given back, at the recent rate; 0.0 where none were yet."""
        return places * self._left_s / self._left if self._left else 0.0
