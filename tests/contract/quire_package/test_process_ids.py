from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from quire.local.pids import MARK_VARIABLE, ProcessId, marked


def test_a_process_is_waited_for_and_found_by_its_mark() -> None:
    environment = {**os.environ, MARK_VARIABLE: "the-mark"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        process = ProcessId.of(child.pid)
        # Between fork and exec a child still shows its parent's environment; its own command line is there after it.
        while b"input" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            pass
        assert marked("the-mark") == [process]
        assert marked("another") == []
        assert not process.wait(0.01)
        assert process.signal(signal.SIGKILL)
        assert process.wait(30)
        assert not process.alive()  # though it is not reaped yet
    finally:
        child.kill()
        child.communicate()
