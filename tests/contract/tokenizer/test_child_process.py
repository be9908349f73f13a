"""A child process of the tokenizer, seen from the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading

import psutil
import pytest

from quire_common.children.child_process import ChildProcess
from tests.contract.tokenizer.test_tokenizer_service import wait_for


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGPROF])
async def test_status_of_a_child_that_ended_by_itself_is_its_own(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the event loop's thread, which waits for its end, comes late, as on a busy machine."""
    wait = asyncio.ThreadedChildWatcher._do_waitpid  # type: ignore[attr-defined]  # asyncio's own

    def late(self: asyncio.ThreadedChildWatcher, loop: object, pid: int, *rest: object) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            threading.Event().wait(0.3)
        wait(self, loop, pid, *rest)

    monkeypatch.setattr(asyncio.ThreadedChildWatcher, "_do_waitpid", late)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import os, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), {int(number)})"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    child = ChildProcess(process, 100)
    with pytest.raises((OSError, EOFError)):
        await child.ask(b"a")
    await wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert await child.kill() == -number and not child.alive
