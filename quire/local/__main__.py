"""`python -m quire.local`: a supervisor's process. A StackSpec comes in as the first line, events go out as lines.

An owned stack ends at the end of its standard input, which the owner holds open: so it ends with the owner, however
that ends. A detached one ends by SIGTERM or SIGINT alone. SIGHUP starts at once what waits to be started again.
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
    """Write the event to the owner, while there is one, and to the supervisor's log."""
    line = events.encode(event)
    print(f'{{"ts": {time.time():.3f}, {line[1:]}', file=sys.stderr, flush=True)
    with suppress(OSError, ValueError):
        print(line, flush=True)


async def supervise(spec: StackSpec, directory: StateDirectory) -> bool:
    """Run the stack until a signal stops it, its owner ends, or it fails. Returns whether it was stopped rather than
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
    """End what a supervisor that was killed left of its children's children. Its lock is ours: it is dead."""
    before = directory.read()
    if before is not None:
        stop_stack(before, 0.0)


def main() -> int:
    """Run a supervisor for the StackSpec that stdin gives. Exit code 0 for a stack that was stopped, 1 for one that
    failed, then or later."""
    spec = StackSpec.from_json(sys.stdin.readline())
    directory = StateDirectory(spec.name)
    try:
        with directory.hold():
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
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(supervisor.request_stop)


if __name__ == "__main__":
    code = main()
    # A thread still reads standard input, and standard output may be closed: skip the interpreter's goodbyes.
    sys.stderr.flush()
    os._exit(code)
