"""Stage 1: the tests of tests/unit/worker_triton, on whatever device there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.gpu_checks.record import Recorder

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "tests/unit/worker_triton"


def run(recorder: Recorder, *, tiny: bool) -> None:
    """All but those of this very check, which are other stages; `tiny`: one file."""
    tests = [f"{_FOLDER}/test_memory.py"] if tiny else [_FOLDER, f"--ignore={_FOLDER}/test_gpu_check.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.strip().splitlines()
    failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
    recorder.check(
        "unit tests of kernels",
        done.returncode == 0,
        told=told[-1][:200] if told else done.stderr[-200:],
        failed="; ".join(failed[:10]),
    )
