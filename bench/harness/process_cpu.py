"""CPU time of processes, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return user and system time of a process so far, without its children, in whole ticks of 10 ms. The kernel
    only estimates which part of the sum is user time, so callers must use the sum."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def tree_cpu_s(pid: int) -> float:
    """Return user and system time of a process and all its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return cpu_s(pid) + sum(map(tree_cpu_s, children))
