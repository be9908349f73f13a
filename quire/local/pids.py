"""Identifies processes by pid and start time, or by a mark in their environment. So a process that reuses a pid is
never taken for one of the stack.

Linux has both in /proc. On other systems, the start time is not known, and a pid is trusted as long as its process
lives.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Every child of a stack carries it, and so do the children of children.
MARK_VARIABLE = "QUIRE_STACK_ID"
# Fields of /proc/<pid>/stat after the command's name, which may itself hold spaces and brackets.
_STATE, _START_TIME = 0, 19
_POLL_S = 0.05


@dataclass(frozen=True)
class ProcessId:
    """Identifies one process, also after its pid was reused. `start_time` is in clock ticks since boot; 0: unknown."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the ProcessId of the process that has this pid now."""
        fields = _stat(pid)
        return cls(pid, int(fields[_START_TIME]) if fields else 0)

    def alive(self) -> bool:
        """Whether exactly this process still runs. A zombie does not count as running."""
        if not PROC.is_dir():
            return _exists(self.pid)
        fields = _stat(self.pid)
        return bool(fields) and fields[_STATE] not in "ZX" and int(fields[_START_TIME]) == self.start_time

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process. Returns False, and sends nothing, if it has ended, its pid was reused,
        or it may not be signalled."""
        with suppress(ProcessLookupError, PermissionError):
            descriptor = _descriptor_of(self.pid)
            if descriptor is None:
                if self.alive():
                    os.kill(self.pid, number)
                    return True
                return False
            try:
                # The descriptor holds fast: what is verified now cannot be another process by the time of the signal.
                if self.alive():
                    signal.pidfd_send_signal(descriptor, number)
                    return True
            finally:
                os.close(descriptor)
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until exactly this process has ended. Returns False if it still runs. Where there is
        no descriptor to wait for (see `_descriptor_of`), look every 0.05 s."""
        descriptor = _descriptor_of(self.pid)
        if descriptor is None:
            deadline_s = time.monotonic() + timeout_s
            while self.alive() and (left_s := deadline_s - time.monotonic()) > 0:
                time.sleep(min(left_s, _POLL_S))
            return not self.alive()
        try:
            if not self.alive():
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(max(timeout_s, 0) * 1000)) or not self.alive()
        finally:
            os.close(descriptor)


def marked(stack_id: str) -> list[ProcessId]:
    """Return every live process, in no order, that has the stack's id in its environment; zombies do not count. This
    includes children of children whose parents have ended. Processes whose environment this user may not read are left
    out. Systems without /proc find none."""
    wanted = f"{MARK_VARIABLE}={stack_id}".encode()
    found = []
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = ProcessId.of(int(entry.name))
                if process.alive():
                    found.append(process)
    return found


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor of the process. None if the process has ended, or if the system has no such descriptors or
    refuses one, as old kernels and some sandboxes do."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command's name; empty if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    """Whether any process, of whatever user, has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
