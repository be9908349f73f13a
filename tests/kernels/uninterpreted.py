"""Python in a process of its own, in which Triton compiles kernels and does not interpret them."""

from __future__ import annotations

import os
import subprocess
import sys

from bench import ROOT


def run_uninterpreted(*arguments: str, timeout_s: float = 600.0, **environment: str) -> str:
    """Run `python ARGUMENTS` without Triton's interpreter. Returns its output; fails the test if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
