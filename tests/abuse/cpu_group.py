"""Makes the kernel's scheduler weigh all threads of the arena alike, as it does in a container.

Outside of containers the kernel may group processes by session (autogroup). Each service has a session of its own, and
then a service with a dozen busy threads gets no more processor time than one with a single busy thread. All
BusyProcesses together would weigh as much as one service, so the load without abuse would be lighter than it says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


@contextlib.contextmanager
def one_cpu_group() -> Iterator[bool]:
    """Hold this process, and those that it starts, in one control group of its present one. Yields whether the kernel
    allowed it: it needs root, and control groups of version 1 with the controller `cpu`."""
    group = _CPU_GROUPS / _own_group() / f"quire-abuse-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        # Processes that are about to end keep the group for a moment; an empty group costs nothing.
        with contextlib.suppress(OSError):
            group.rmdir()


def _own_group() -> str:
    """Return the path of this process's group below the controller's folder."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return path.lstrip("/")
    return ""
