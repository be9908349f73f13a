"""Virtual time: events in order, as fast as the machine goes. And a line that delays what it carries."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

T = TypeVar("T")
# The virtual epoch, in Unix seconds: what the scheduler is told starts here.
BEGIN_S = 1_000_000.0


class Runaway(AssertionError):
    """Events do not come to an end: something goes round in circles."""


class VirtualTime:
    """A heap of (time, order, what to do). Equal times go in the order in which they were asked for."""

    def __init__(self, most_events: int = 50_000) -> None:
        self.now_us = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._left = most_events

    @property
    def now_s(self) -> float:
        """As the scheduler counts."""
        return BEGIN_S + self.now_us / 1e6

    def at(self, time_us: int, what: Callable[[], None]) -> None:
        """Do it then, or now if that has passed."""
        heapq.heappush(self._events, (max(time_us, self.now_us), next(self._order), what))

    def after(self, delay_us: int, what: Callable[[], None]) -> None:
        """Do it so much later."""
        self.at(self.now_us + delay_us, what)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self._left -= 1
            if self._left < 0:
                raise Runaway(f"still busy at {self.now_us / 1e6:.3f} virtual seconds")
            self.now_us, _, what = heapq.heappop(self._events)
            what()


class DelayLine(Generic[T]):
    """Frames in order, each `least` to `most` microseconds late: what TCP makes of a jittery network."""

    def __init__(
        self, time: VirtualTime, rng: np.random.Generator, delay_us: tuple[int, int], deliver: Callable[[T], None]
    ) -> None:
        self._time = time
        self._rng = rng
        self._delay_us = delay_us
        self._deliver = deliver
        self._last_us = 0

    def send(self, frame: T) -> None:
        """It arrives after all that was sent before."""
        least, most = self._delay_us
        self._last_us = max(self._last_us, self._time.now_us + int(self._rng.integers(least, most + 1)))
        self._time.at(self._last_us, lambda: self._deliver(frame))
