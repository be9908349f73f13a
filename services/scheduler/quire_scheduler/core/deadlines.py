"""Deadlines: the requests that have a deadline, by the time of the deadline."""

from __future__ import annotations

import heapq
import math

from quire_scheduler.core.request import Request, State

_SWEEP = 64


class Deadlines:
    """A heap of requests, the earliest deadline first. Entries of finished requests are skipped, and are removed
    together when the heap has doubled."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = _SWEEP

    def watch_deadline(self, request: Request, deadline_s: float) -> None:
        """Add the request with its deadline, in seconds of the core's clock; infinity means that it has none, and
        nothing is added. When the heap has doubled since the last cleaning, entries of finished requests are
        removed."""
        if deadline_s < math.inf:
            heapq.heappush(self._heap, (deadline_s, request.uid, request))
            if len(self._heap) > self._sweep_at:
                self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
                heapq.heapify(self._heap)
                self._sweep_at = 2 * len(self._heap) + _SWEEP

    def take_expired(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed before they have ended."""
        found = list[Request]()
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.state is not State.FINISHED:
                found.append(request)
        return found
