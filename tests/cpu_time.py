"""CPU time of short calls."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_s(call: Callable[[], object], times: int = 3) -> float:
    """The least CPU time of this thread for one of several calls: the garbage collector may run within any."""
    took_s = []
    for _ in range(times):
        began_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - began_s)
    return min(took_s)
