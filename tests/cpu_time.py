"""CPU time of short calls, and of processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def least_cpu_s(call: Callable[[], object], times: int = 3) -> float:
    """The least CPU time of this thread for one of several calls: the garbage collector may run within any."""
    took_s = []
    for _ in range(times):
        began_s = time.thread_time()
        call()
        took_s.append(time.thread_time() - began_s)
    return min(took_s)


def process_cpu_s(process: psutil.Process) -> float:
    """The CPU time that a process has taken, in whole ticks of 10 ms. The kernel guesses how it divides into the times
    of user and system, so that a test must not rely on one of them."""
    times = process.cpu_times()
    return float(times.user + times.system)
