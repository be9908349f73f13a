"""Stage 6: the in-process table once more, through the five services over HTTP: what the pipeline costs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_checks.record import Recorder
from bench.gpu_checks.table import beside
from bench.gpu_serve import write_config
from bench.gpu_shapes import SHAPES
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300
_COST_WANTED = 0.03


class _Load(NamedTuple):
    """So many requests at once."""

    requests: int
    input_len: int
    output_len: int
    row: str
    """Of `bench.gpu_engine`."""
    figure: str
    """Of its row."""
    served: str
    """The same of `quire bench serve`."""
    spread: float = 0.0


_ITL = [_Load(batch, 128, 128, f"itl {batch}", "itl_ms", "median_tpot_ms") for batch in (1, 8, 32, 128, 256)]
_LOADS = {
    "0.6B": [
        *_ITL,
        _Load(512, 512, 256, "512 x 512/256", "output_tok_s", "output_throughput"),
        _Load(256, 562, 562, "256 x 100..1024", "output_tok_s", "output_throughput", 0.822),
        _Load(32, 4096, 1, "prefill 32 x 4096", "input_tok_s", "input_throughput"),
        _Load(1, 1024, 2, "prompt 1024", "first_ms", "median_ttft_ms"),
    ],
    "8B": [
        *_ITL,
        _Load(512, 512, 256, "512 x 512/256", "output_tok_s", "output_throughput"),
        _Load(32, 4096, 1, "prefill 32 x 4096", "input_tok_s", "input_throughput"),
        _Load(1, 1024, 2, "prompt 1024", "first_ms", "median_ttft_ms"),
    ],
}


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Real shapes with random weights; without a GPU nothing."""
    if not torch.cuda.is_available():
        recorder.skip(
            "the table through the services", "there is no GPU: the paced and CPU benchmarks say what there is"
        )
        return
    for name, loads in _LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            served = _served(name, loads[:1] if tiny else loads, Path(folder))
            local = _in_process(name, Path(folder))
        for load in loads:
            if load.row in served:
                through, inside = served[load.row], local[f"{name} {load.row}"][load.figure]
                cost = through / inside - 1 if load.figure.endswith("_ms") else 1 - through / inside
                recorder.figure(
                    f"{name} {load.row}, {load.figure}",
                    services=through,
                    in_process=inside,
                    cost_percent=100 * cost,
                    within_3_percent=cost <= _COST_WANTED,
                    **beside(f"{name} {load.row}", through),
                )


def _served(name: str, loads: list[_Load], folder: Path) -> dict[str, float]:
    """Row -> the figure through the services; each load runs twice, with other prompts, and the second counts."""
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {"device": "cuda", "load-format": "dummy"},
        # As vLLM's figures were taken; a warm-up would leave its prompt to the request that is measured.
        "scheduler": {"kvstore-min-tokens": "1000000", "enable-prefix-caching": False},
        "router": {"max-concurrent-requests": "4096"},
    }
    model = write_config(folder / name, SHAPES[name], 8192)
    found = {}
    with contextlib.closing(LocalStack(StackSpec("gpu-check", str(model), flags=flags))) as stack:
        for index, load in enumerate(loads):
            out = folder / f"{index}.json"
            for turn in range(2):
                command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", stack.ready.http]
                command += ["--num-prompts", str(load.requests)]
                command += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
                command += ["--random-range-ratio", str(load.spread), "--ignore-eos", "--seed", str(2 * index + turn)]
                command += ["--save-result", "--result-dir", str(folder), "--result-filename", out.name]
                subprocess.run(command, timeout=_LIMIT_S, stdout=sys.stderr, check=True)
            result = json.loads(out.read_text())
            result["input_throughput"] = result["total_input_tokens"] / result["duration"]
            found[load.row] = float(result[load.served])
    return found


def _in_process(name: str, folder: Path) -> dict[str, dict[str, float]]:
    out = folder / "inside.json"
    rows = ["itl", "throughput", "uniform", "prefill", "single"]
    command = [sys.executable, "-m", "bench.gpu_engine", "--models", name, "--rows", *rows, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, timeout=_LIMIT_S, stdout=sys.stderr, check=True)
    found: dict[str, dict[str, float]] = json.loads(out.read_text())
    return found
