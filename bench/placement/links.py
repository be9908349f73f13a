"""The way of pages between simulated replicas: two links into each decode side, from other hosts and from
its own, each of which carries one request at a time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.placement.replica import Run


class Links:
    """A pull runs beside its prefill and never ends before it; `hop_s` later a row may decode."""

    def __init__(
        self, replicas: int, bandwidth: float, near_bandwidth: float, page_bytes: float, hop_s: float = 0.001
    ) -> None:
        self._bandwidths = bandwidth, near_bandwidth
        self._page_bytes = page_bytes
        self._hop_s = hop_s
        self._free_s = [0.0] * replicas, [0.0] * replicas
        self._moving: list[tuple[float, int, int, Run]] = []
        self._order = itertools.count()

    def send(self, row: int, run: Run, pages: int, *, near: bool) -> float:
        """A prefill is done: its pages were on their way to a replica meanwhile. Returns how long they took, in s."""
        free_s = self._free_s[near]
        began_s = max(run.started_s, free_s[row])
        sent_s = began_s + pages * self._page_bytes / self._bandwidths[near]
        over_s = max(run.first_s, sent_s)
        if pages:
            free_s[row] = sent_s
        heapq.heappush(self._moving, (over_s + self._hop_s, next(self._order), row, run))
        return over_s - began_s

    def arrived(self, until_s: float) -> Iterator[tuple[int, Run, float]]:
        """What is there by now: for whom, of what, and since when."""
        while self._moving and self._moving[0][0] <= until_s:
            at_s, _, row, run = heapq.heappop(self._moving)
            yield row, run, at_s
