"""Pacer: makes each step last its configured time. It follows an absolute schedule, so that late wake-ups do not add
up.

A step ends one step time after it was launched, or after the step before it ended, whichever is later. A device behaves
in the same way with a queue of launches. A caller that launches in time keeps the pacer busy without a gap. A caller
that first waits for the end of a step loses the time from this end to its next launch.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A sleep ends about this much too late. The rest of the wait is short sleeps that let other threads run.
_MARGIN_NS = 30_000
_PR_SET_TIMERSLACK = 29


class Pacer:
    """The pacer belongs to the one thread that runs steps."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._end_ns = 0
        self._thread = 0

    def end_of_step(self, launched_ns: int, step_ns: int) -> int:
        """Schedule a step, and return when it ends: `step_ns` after its launch or after the end of the step before,
        whichever is later. `launched_ns` 0: it is launched now."""
        self._end_ns = max(self._end_ns, launched_ns or self._clock_ns()) + step_ns
        return self._end_ns

    def wait_until(self, deadline_ns: int) -> None:
        """Sleep until the deadline on the pacer's clock; return at once if it has passed. On Linux, sleeps of the
        calling thread end more exactly from now on. The last 30 microseconds are short sleeps that let other threads
        run."""
        self._shorten_timer_slack()
        while (left := deadline_ns - self._clock_ns()) > 0:
            self._sleep((left - _MARGIN_NS) / 1e9 if left > _MARGIN_NS else 0.0)

    def _shorten_timer_slack(self) -> None:
        """Ask Linux, once per thread, to end sleeps without its usual delay of 50 microseconds."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
