"""Stage 3: scheduler core, engine and GPU in one process (`bench.gpu_engine`), beside vLLM's figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu_checks.record import Figure, Recorder

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 540
ROWS: dict[str, tuple[str, float, float]] = {
    **{
        f"0.6B itl {batch}": ("itl_ms", theirs, wanted)
        for batch, theirs, wanted in (
            (1, 1.85, 0.75),
            (8, 1.99, 1.15),
            (32, 2.19, 1.4),
            (128, 3.38, 2.6),
            (256, 5.67, 3.9),
        )
    },
    **{
        f"8B itl {batch}": ("itl_ms", theirs, wanted)
        for batch, theirs, wanted in (
            (1, 4.92, 3.95),
            (8, 4.96, 4.4),
            (32, 5.5, 4.8),
            (128, 7.57, 6.6),
            (256, 11.5, 10.2),
        )
    },
    "0.6B 512 x 512/256": ("output_tok_s", 31_839, 42_000),
    "8B 512 x 512/256": ("output_tok_s", 10_148, 11_000),
    "0.6B 256 x 100..1024": ("output_tok_s", 23_773, 30_000),
    "0.6B prefill 32 x 4096": ("input_tok_s", 352_582, 390_000),
    "8B prefill 32 x 4096": ("input_tok_s", 41_070, 41_500),
    "0.6B prompt 1024": ("first_ms", 20.1, 8.0),
    "8B prompt 1024": ("first_ms", 27.5, 27.0),
}
"""Model and row -> the figure that counts, vLLM's, what is wanted. Milliseconds are to be below, the others above."""
_PERCENT_OVER_GREEDY = {"sampling 256": 8.0, "logprobs 256": 5.0}


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
            key = ROWS[row][0]
            recorder.figure(row, **{key: measured[key]}, **beside(row, measured[key]))
        elif kind in _PERCENT_OVER_GREEDY and f"{model} itl 256" in figures:
            wanted = _PERCENT_OVER_GREEDY[kind]
            percent = 100 * (measured["itl_ms"] / figures[f"{model} itl 256"]["itl_ms"] - 1)
            recorder.figure(
                row, itl_ms=measured["itl_ms"], percent=percent, wanted_percent=wanted, reached=percent <= wanted
            )
        else:
            recorder.figure(row, **measured)


def beside(row: str, value: float) -> dict[str, Figure]:
    """What a value of that row is measured against."""
    key, theirs, wanted = ROWS[row]
    below = key.endswith("_ms")
    return {
        "vllm": theirs,
        "wanted": wanted,
        "beats_vllm": value < theirs if below else value > theirs,
        "reached": value <= wanted if below else value >= wanted,
    }
