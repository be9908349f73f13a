"""The way of pages between simulated replicas: one link into each decode side, which carries one request at a time."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.simulate_replica import Run

# How much of the last pull is in a decode side's mean rate.
_NEW = 0.2


class Links:
    """`rates`: bytes per second of recent pulls by replica, 0 before the first, as schedulers tell them: from the start
    of a prefill to the last page. A pull runs beside its prefill and never ends before it; `hop_s` later a row may
    decode."""

    def __init__(self, replicas: int, bandwidth: float, page_bytes: float, hop_s: float = 0.001) -> None:
        self.rates = [0.0] * replicas
        self._bandwidth = bandwidth
        self._page_bytes = page_bytes
        self._hop_s = hop_s
        self._free_s = [0.0] * replicas
        self._moving: list[tuple[float, int, int, Run]] = []
        self._order = itertools.count()

    def send(self, row: int, run: Run, pages: int) -> None:
        """A prefill is done: its pages were on their way to a replica meanwhile."""
        sent_s = max(run.started_s, self._free_s[row]) + pages * self._page_bytes / self._bandwidth
        over_s = max(run.first_s, sent_s)
        if pages:
            self._free_s[row] = sent_s
            rate = pages * self._page_bytes / max(over_s - run.started_s, 1e-6)
            self.rates[row] += (_NEW if self.rates[row] else 1.0) * (rate - self.rates[row])
        heapq.heappush(self._moving, (over_s + self._hop_s, next(self._order), row, run))

    def arrived(self, until_s: float) -> Iterator[tuple[int, Run, float]]:
        """What is there by now: for whom, of what, and since when."""
        while self._moving and self._moving[0][0] <= until_s:
            at_s, _, row, run = heapq.heappop(self._moving)
            yield row, run, at_s
