"""The transfer of pages between simulated replicas. Each decode side has two links, one from other hosts and one from
its own host. A link carries the pages of one request at a time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.placement.replica import Run


class Links:
    """A pull runs during its prefill and never ends before it. A row may decode `hop_s` later."""

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
        """Note that a prefill is done, whose pages were transferred to a replica meanwhile. Returns the time of the
        transfer in seconds."""
        free_s = self._free_s[near]
        began_s = max(run.started_s, free_s[row])
        sent_s = began_s + pages * self._page_bytes / self._bandwidths[near]
        over_s = max(run.first_s, sent_s)
        if pages:
            free_s[row] = sent_s
        heapq.heappush(self._moving, (over_s + self._hop_s, next(self._order), row, run))
        return over_s - began_s

    def arrived(self, until_s: float) -> Iterator[tuple[int, Run, float]]:
        """Return the pages that have arrived: for which replica, of which request, and since when."""
        while self._moving and self._moving[0][0] <= until_s:
            at_s, _, row, run = heapq.heappop(self._moving)
            yield row, run, at_s
