"""Stage 6: the in-process table once more, through the five services over HTTP: what the pipeline costs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_checks.http_load import LOAD_GENERATOR, HttpLoad, stack_of
from bench.gpu_checks.record import Recorder
from bench.gpu_figures import ITL, ROWS, SERVICES_COST
from bench.gpu_model import write_config
from bench.gpu_shapes import SHAPES
from quire.local.stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300
_SERVED = {
    "itl_ms": "median_tpot_ms",
    "output_tok_s": "output_throughput",
    "input_tok_s": "input_throughput",
    "first_ms": "median_ttft_ms",
}
"""A figure of `bench.gpu_engine` -> the same of `quire bench serve`."""


class _Load(NamedTuple):
    """A row of `bench.gpu_engine`."""

    row: str
    load: HttpLoad


_ALONE = 16
"""Requests one after the other, where a row is of one: the first of a server's life is no figure."""
_LOADS = [
    _Load("itl 1", HttpLoad(_ALONE, 128, 128, concurrency=1)),
    *(_Load(f"itl {batch}", HttpLoad(batch, 128, 128)) for batch in ITL["0.6B"] if batch > 1),
    _Load("512 x 512/256", HttpLoad(512, 512, 256)),
    _Load("256 x 100..1024", HttpLoad(256, 562, 562, spread=0.822)),
    _Load("prefill 32 x 4096", HttpLoad(32, 4096, 1)),
    _Load("prompt 1024", HttpLoad(_ALONE, 1024, 2, concurrency=1)),
]


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Real shapes with random weights; without a GPU nothing."""
    if not torch.cuda.is_available():
        recorder.skip(
            "the table through the services", "there is no GPU: the paced and CPU benchmarks say what there is"
        )
        return
    for name in SHAPES:
        loads = [each for each in _LOADS if f"{name} {each.row}" in ROWS]
        with tempfile.TemporaryDirectory() as folder:
            served = _served(name, loads[:1] if tiny else loads, Path(folder))
            local = _in_process(name, Path(folder))
        for row, through in served.items():
            report_row(recorder, f"{name} {row}", through, local[f"{name} {row}"][ROWS[f"{name} {row}"].figure])


def report_row(recorder: Recorder, row: str, through: float, inside: float) -> None:
    """A figure through the services beside what it is measured against, and what the services cost."""
    target = ROWS[row]
    cost = 100 * (through / inside - 1 if target.below else 1 - through / inside)
    recorder.figure(
        f"{row}, {target.figure}",
        services=through,
        **target.beside(through),
        in_process=inside,
        cost_percent=cost,
        cost_wanted=SERVICES_COST.wanted,
        cost_reached=bool(SERVICES_COST.beside(cost)["reached"]),
        load_generator=LOAD_GENERATOR,
    )


def _served(name: str, loads: list[_Load], folder: Path) -> dict[str, float]:
    """Row -> the figure through the services; each load runs twice, with other prompts, and the second counts."""
    model = write_config(folder / name, SHAPES[name], 8192)
    found = {}
    with contextlib.closing(LocalStack(stack_of(model, {"device": "cuda", "load-format": "dummy"}))) as stack:
        for index, (row, load) in enumerate(loads):
            for turn in range(2):
                result = replace(load, seed=2 * index + turn).put(stack.ready.http, folder)
            found[row] = float(result[_SERVED[ROWS[f"{name} {row}"].figure]])
    return found


def _in_process(name: str, folder: Path) -> dict[str, dict[str, float]]:
    out = folder / "inside.json"
    rows = ["itl", "throughput", "uniform", "prefill", "single"]
    command = [sys.executable, "-m", "bench.gpu_engine", "--models", name, "--rows", *rows, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, timeout=_LIMIT_S, stdout=sys.stderr, check=True)
    found: dict[str, dict[str, float]] = json.loads(out.read_text())
    return found
