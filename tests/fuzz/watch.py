"""Bounds that a run of inputs must keep: the time of one input, and the growth of the process."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

from tests.fuzz.target import Finding

MOST_CPU_S = 1.0
"""Most seconds of all threads for one input. Processor time, not wall time: the machine has other work too."""
_MOST_WALL_S = 60.0
"""An input that takes longer waits for something that does not come: the process shows its threads and ends."""
MOST_GROWTH_MIB = 32.0
"""Most growth from the middle of a run to its end: caches are full by then, and a leak of 1 KiB an input is not."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """One per run. Call `begin` before and `end` after each input. `watchdog`: end the process if an input hangs."""

    def __init__(self, inputs: int, *, watchdog: bool = True) -> None:
        self._watchdog = watchdog
        self._inputs = inputs
        self._done = 0
        self._began = 0.0
        self._middle_mib = 0.0
        self.slowest_s = 0.0

    def begin(self) -> None:
        if self._watchdog:
            faulthandler.dump_traceback_later(_MOST_WALL_S, exit=True)
        self._began = time.process_time()

    def end(self) -> None:
        """Raises Finding where the input took too long."""
        spent_s = time.process_time() - self._began
        self._done += 1
        self.slowest_s = max(self.slowest_s, spent_s)
        if self._done == self._inputs // 2:
            self._middle_mib = resident_mib()
        if spent_s > MOST_CPU_S:
            raise Finding(f"it took {spent_s:.2f} s of processor time; the most is {MOST_CPU_S:g} s")

    def growth_mib(self) -> float:
        """Return how much the process has grown since the middle of the run."""
        if self._watchdog:
            faulthandler.cancel_dump_traceback_later()
        return resident_mib() - self._middle_mib if self._middle_mib else 0.0


def resident_mib() -> float:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20)
