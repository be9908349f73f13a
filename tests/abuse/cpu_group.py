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

_CPU_GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


@contextlib.contextmanager
def one_cpu_group() -> Iterator[bool]:
    """Hold this process, and those that it starts, in one control group. Yields whether the kernel allowed it: it needs
    root, and a kernel with control groups."""
    for root in _CPU_GROUPS:
        group = root / f"quire-abuse-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield True
        finally:
            (root / "cgroup.procs").write_text(str(os.getpid()))
            # Processes that are about to end keep the group for a moment; an empty group costs nothing.
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield False
