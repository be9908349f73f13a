"""Stage 3: measures scheduler core, engine and GPU in one process (`bench.gpu.engine`), and compares with vLLM's
figures.

Each model has its own process. If it fails, its results until then are still reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence as Listed
from pathlib import Path

import torch

from bench import ROOT
from bench.gpu.engine import GREEDY
from bench.gpu.figures import OVER_GREEDY, ROWS
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES

_LIMIT_S = 270
WITHOUT_GPU = ("--smaller", "64", "--max-num-seqs", "8")
"""A model for which there is no GPU is gone through with a few short requests."""


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Run both shapes; with `tiny` the small one's first rows; without a GPU a tiny shape, which shows that every row
    exists."""
    names, options = list(SHAPES), list[str]()
    if not has_gpu():
        names, options = ["tiny"], [*WITHOUT_GPU]
    elif tiny:
        names, options = ["0.6B"], ["--rows", "itl", "--max-num-seqs", "8"]
    for name in names:
        report(recorder, measured_in_process(recorder, name, options))


def has_gpu() -> bool:
    """Whether there is a GPU to measure."""
    return torch.cuda.is_available()


def measured_in_process(
    recorder: Recorder, name: str, options: Listed[str], module: str = "bench.gpu.engine", what: str = "in process"
) -> dict[str, dict[str, float]]:
    """Return the figures by model and row of a module that measures, and record a check that it ran to its end."""
    title = f"{name} {what}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, "--models", name, "--out", str(out), *options]
        with recorder.attempt(title):
            done = subprocess.run(command, cwd=ROOT, timeout=_LIMIT_S, stdout=sys.stderr, check=False)
            recorder.check(title, done.returncode == 0, exit_code=done.returncode)
        found: dict[str, dict[str, float]] = json.loads(out.read_text()) if out.exists() else {}
        return found


def report(recorder: Recorder, figures: dict[str, dict[str, float]]) -> None:
    """Report a line for each row, with the figures to compare."""
    for row, measured in figures.items():
        model, _, kind = row.partition(" ")
        if row in ROWS:
            value = measured[ROWS[row].figure]
            recorder.figure(row, **{ROWS[row].figure: value}, **ROWS[row].beside(value))
        elif kind in OVER_GREEDY and (greedy := figures.get(f"{model} {GREEDY}", {}).get("itl_ms")):
            percent = 100 * (measured["itl_ms"] / greedy - 1)
            recorder.figure(row, itl_ms=measured["itl_ms"], percent=percent, **OVER_GREEDY[kind].beside(percent))
        else:
            recorder.figure(row, **measured)
