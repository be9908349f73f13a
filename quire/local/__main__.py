"""`python -m quire.local`: the supervisor process of a stack. The supervisor reads a StackSpec from the first line of
its standard input, and writes events as lines to its standard output.

An owned stack stops when its standard input closes. The owner, which is the process that started the supervisor, holds
this input open. So the stack stops whenever the owner ends, even by a crash. A detached stack has no owner: it stops
only on SIGTERM or SIGINT, which also stop an owned stack. On SIGHUP, the supervisor restarts at once all services that
wait for their restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from quire.errors import QuireError
from quire.local import events
from quire.local.page_cache import remove_abandoned, remove_own_pages
from quire.local.spec import StackSpec
from quire.local.state import StateDirectory
from quire.local.stop import stop_stack
from quire.local.supervisor import Supervisor

EXIT_FAILED = 1


def emit(event: events.Event) -> None:
    """Write the event as a line of JSON to standard output, if its reader still exists. With the time in front, write
    it to the supervisor's log (standard error) too, unless that fails, as on a full disk."""
    line = events.encode(event)
    with suppress(OSError):
        print(f'{{"ts": {time.time():.3f}, {line[1:]}', file=sys.stderr, flush=True)
    with suppress(OSError, ValueError):
        print(line, flush=True)


async def supervise(spec: StackSpec, directory: StateDirectory) -> bool:
    """Run the stack until SIGTERM, SIGINT or the end of an owned stack's owner stops it, or until it fails. The second
    of these three events ends the draining. SIGHUP starts members again that are down. Returns False if the stack
    failed."""
    supervisor = Supervisor(spec, directory, emit)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    loop.add_signal_handler(signal.SIGHUP, supervisor.retry)
    if spec.owned:
        threading.Thread(target=_await_owner, args=(loop, supervisor), daemon=True).start()
    return await supervisor.run()


def sweep(directory: StateDirectory) -> None:
    """End, without draining, the processes that an earlier supervisor of this stack left behind when it was killed.
    This process holds the lock of the state directory, so the earlier supervisor is dead."""
    before = directory.read()
    if before is not None:
        stop_stack(before, 0.0)


def main() -> int:
    """Run a supervisor for the StackSpec on the first line of standard input, while it holds the lock of the stack's
    directory. What earlier supervisors left behind is ended or removed first. A temporary stack's pages are removed at
    the end, and its directory too if it ended well. Returns the exit code: 0 if the stack was stopped, 1 if it failed
    at its start or later. It is 1 too, after a Failed event, for a QuireError, such as that of a lock which another
    supervisor holds."""
    spec = StackSpec.from_json(sys.stdin.readline())
    directory = StateDirectory(spec.name)
    try:
        with directory.hold_lock():
            sweep(directory)
            remove_abandoned()
            well = asyncio.run(supervise(spec, directory))
            if not spec.keep_directory:
                remove_own_pages(directory)
    except QuireError as error:
        emit(events.Failed("", error.code, error.message, error.fix, ""))
        return EXIT_FAILED
    if well and not spec.keep_directory:
        directory.remove()
    return 0 if well else EXIT_FAILED


def _await_owner(loop: asyncio.AbstractEventLoop, supervisor: Supervisor) -> None:
    """Run in a thread: read standard input until the owner closes it, then ask the supervisor to stop."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(supervisor.request_stop)


if __name__ == "__main__":
    code = main()
    # A thread still reads standard input, and standard output may be closed: skip the interpreter's goodbyes.
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
