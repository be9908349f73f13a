"""Stage 1: the tests of tests/kernels, on whatever device there is, in several processes: they compile."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from bench import ROOT
from bench.gpu.record import Recorder
from quire_worker.threads.cores import usable_cores

_FOLDER = ROOT / "tests/kernels"
_MOST_PROCESSES = 12
_MARKS = "not slow and not deep and not perf"
# Those of this very check are other stages.
_OTHERS = ("test_gpu_check.py",)
_TOLD = 10
_SHOWN = 60
"""Lines of what a process printed that failed."""
_LIMIT_S = 420


def run(recorder: Recorder, *, tiny: bool) -> None:
    """All files, the longest first and one to each process in turn; `tiny`: one file."""
    files = [file for file in _FOLDER.rglob("test_*.py") if file.name not in _OTHERS]
    files = sorted(files, key=lambda file: (-file.stat().st_size, file.name))
    count = max(2, min(_MOST_PROCESSES, usable_cores() - 2))
    shares = [[_FOLDER / "memory" / "test_memory.py"]] if tiny else [files[place::count] for place in range(count)]
    with contextlib.ExitStack() as stack:
        started, ends = [_start(share, stack) for share in shares], time.monotonic() + _LIMIT_S
        for place, (process, output) in enumerate(started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends - time.monotonic()))
            output.seek(0)
            told = output.read().strip().splitlines()
            if process.returncode:
                print("\n".join(told[-_SHOWN:]), file=sys.stderr, flush=True)
            failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
            recorder.check(
                f"unit tests of kernels, {place + 1} of {len(shares)}",
                process.returncode == 0,
                told=" ".join(told[-1:])[-200:],
                failed="; ".join(failed[:_TOLD]),
            )


def _start(files: list[Path], stack: contextlib.ExitStack) -> tuple[subprocess.Popen[str], IO[str]]:
    """A process that ends with the stack, and what it prints."""
    output = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # the stack closes it
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-m", _MARKS, *map(str, files)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
    stack.callback(_end, process)
    return process, output


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
