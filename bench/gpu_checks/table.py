"""Stage 3: scheduler core, engine and GPU in one process (`bench.gpu_engine`), beside vLLM's figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu_checks.record import Recorder
from bench.gpu_figures import OVER_GREEDY, ROWS

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 540


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Nothing of it can be done without a GPU."""
    if not torch.cuda.is_available():
        recorder.skip("in-process table", "there is no GPU, and real shapes take hours without one")
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "bench.gpu_engine", "--out", str(out)]
        command += ["--models", "0.6B", "--rows", "itl", "--max-num-seqs", "8"] if tiny else []
        done = subprocess.run(command, cwd=ROOT, timeout=_LIMIT_S, stdout=sys.stderr, check=False)
        recorder.check("in-process table", done.returncode == 0)
        if done.returncode == 0:
            report(recorder, json.loads(out.read_text()))


def report(recorder: Recorder, figures: dict[str, dict[str, float]]) -> None:
    """A line for each row, with what it is measured against."""
    for row, measured in figures.items():
        model, _, kind = row.partition(" ")
        if row in ROWS:
            value = measured[ROWS[row].figure]
            recorder.figure(row, **{ROWS[row].figure: value}, **ROWS[row].beside(value))
        elif kind in OVER_GREEDY and f"{model} itl 256" in figures:
            percent = 100 * (measured["itl_ms"] / figures[f"{model} itl 256"]["itl_ms"] - 1)
            recorder.figure(row, itl_ms=measured["itl_ms"], percent=percent, **OVER_GREEDY[kind].beside(percent))
        else:
            recorder.figure(row, **measured)
