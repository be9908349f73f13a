"""ChildProcess: one service as a child of this process, from its start to the end of the last process of its group.

All methods but `_wait` run in the main thread. The thread that sends signals also reaps, so a pid is never signalled
after the kernel could have reused it. This module knows nothing of the service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from quire.local.pids import ProcessId

# Seconds from SIGTERM to SIGKILL for a process that failed to start, which has nothing to drain.
FAILED_STOP_S = 5.0
_BOOTSTRAP = Path(__file__).with_name("child.py")


class ChildProcess:
    """A child process with its own session and process group. On Linux, the kernel kills it when its parent ends. The
    constructor starts it, and needs a running event loop."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        again: bool = False,
        niceness: int = 0,
    ) -> None:
        """Start the process, with no input and with its output in the log. `again`: append to the log of the member's
        earlier process; otherwise that log is renamed to `.log.1`. `niceness` is added to the Unix nice value; a higher
        value gives other processes precedence."""
        self.name = name
        self.log = log
        self.exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if not again:
            with suppress(FileNotFoundError):
                log.replace(log.with_suffix(".log.1"))
        with log.open("ab") as output:
            # The byte of the log at which the output of this process begins.
            self.log_start = output.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid()), str(niceness), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.process = ProcessId.of(self._popen.pid)
        threading.Thread(target=self._wait, name=f"wait-{name}", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code: None until the process has ended and was reaped, and negative if a signal ended it."""
        return self._popen.returncode

    def terminate(self) -> None:
        """Send SIGTERM, which asks the process to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group of the child. Does nothing if the child was reaped."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it was reaped."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._popen.pid, number)

    def _wait(self) -> None:
        """In a thread, wait for the end of the process without reaping it, then have the event loop call `_reap`. Until
        then, pid and group stay taken."""
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # the loop is closed: this process ends, and nobody is left to tell
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        """Kill what is left of the child's process group, take the child's exit code, and set `exited`."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)  # what the child left behind of its group
        self._popen.wait()
        self.exited.set()
