"""A child process of the tokenizer and a pool of such processes, seen from the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from quire_common.children.child_pool import ChildFailed, ChildPool
from quire_common.children.child_process import ChildProcess, ChildProgram
from quire_common.children.frames import framed
from quire_common.errors import Overloaded
from tests.contract.tokenizer.test_tokenizer_service import wait_for

if TYPE_CHECKING:
    from pathlib import Path

# Answers its first job; breaks the protocol on its second, and stays alive.
BREAKS = """
import os, sys, time
from quire_common.children.frames import HEADER, read_frame, write_frame
write_frame(sys.stdout.buffer, {})
read_frame(sys.stdin.buffer)
write_frame(sys.stdout.buffer, {})
read_frame(sys.stdin.buffer)
if sys.argv[1] == "closes":
    os.close(1)
else:
    os.write(1, HEADER.pack(20_000, 0) + b"[" * 10_000 + b"]" * 10_000)
time.sleep(60)
"""


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


@pytest.mark.parametrize("how", ["closes", "nests"])
async def test_job_whose_child_breaks_the_protocol_fails_and_is_not_repeated(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaking_child.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def error(_others: int = 0) -> Overloaded:
        return Overloaded("BUSY", "The pool is full, or a child did not start.", "Retry.")

    pool = ChildPool(ChildProgram("breaking_child", (how,), 100_000, error), 1, 1, 30.0, error)
    assert (await pool.run(framed({}))).message == {}
    with pytest.raises(ChildFailed) as caught:
        await pool.run(framed({}))
    assert caught.value.how == "crashed"
    await pool.close()
