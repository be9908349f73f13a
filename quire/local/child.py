"""Starts a service in this process, which the kernel of Linux kills when the supervisor dies for any reason.

The supervisor runs this file by path (`python -I -S child.py SUPERVISOR_PID NICENESS COMMAND...`), so it imports only
the standard library. It uses the kernel's PR_SET_PDEATHSIG, which survives exec, needs no cooperation of the service,
and kills even a service that hangs. (A pipe that the service must watch would not.) The signal comes when the *thread*
that forked ends, so the supervisor forks in its main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 3


def main(argv: list[str]) -> NoReturn:
    """Replace this process by a command. `argv` has the supervisor's pid, the nice value to add, and the command's
    words. On Linux, the kernel kills the process when the supervisor dies; if that cannot be arranged, a line on
    standard error says so, and the command runs all the same. If the supervisor is dead already, exit with
    EXIT_ORPHANED. Raises OSError if the command cannot be run; its first word is a path, and PATH is not searched."""
    supervisor, niceness, command = int(argv[0]), int(argv[1]), argv[2:]
    os.nice(niceness)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    if os.getppid() != supervisor:  # it died before prctl: no signal will come
        sys.exit(EXIT_ORPHANED)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
