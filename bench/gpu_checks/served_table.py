"""Stage 6: the in-process table once more, through the five services over HTTP: what the pipeline costs.

A row that fails is a check that fails; the others are measured and told all the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_checks.http_load import LOAD_GENERATOR, HttpLoad, stack_of
from bench.gpu_checks.record import Figure, Recorder
from bench.gpu_checks.table import WITHOUT_GPU, measured_in_process
from bench.gpu_engine import CONTEXT
from bench.gpu_figures import ITL, ROWS, SERVICES_COST, Target
from bench.gpu_model import write_config
from bench.gpu_shapes import MODELS, SHAPES
from quire.local.stack import LocalStack

_SERVED = {
    "itl_ms": "median_tpot_ms",
    "output_tok_s": "output_throughput",
    "input_tok_s": "input_throughput",
    "first_ms": "median_ttft_ms",
}
"""A figure of `bench.gpu_engine` -> the same of `quire bench serve`."""


class Load(NamedTuple):
    """A row of `bench.gpu_engine`."""

    row: str
    load: HttpLoad

    @property
    def target(self) -> Target:
        """What it is measured against with the small model, which has all rows."""
        return ROWS[f"0.6B {self.row}"]

    @property
    def figure(self) -> str:
        """Which figure counts, whatever the model."""
        return self.target.figure


_ALONE = 16
"""Requests one after the other, where a row is of one: the first of a server's life is no figure."""
LOADS = [
    Load("itl 1", HttpLoad(_ALONE, 128, 128, concurrency=1)),
    *(Load(f"itl {batch}", HttpLoad(batch, 128, 128)) for batch in ITL["0.6B"] if batch > 1),
    Load("512 x 512/256", HttpLoad(512, 512, 256)),
    Load("256 x 100..1024", HttpLoad(256, 562, 562, spread=0.822)),
    Load("prefill 32 x 4096", HttpLoad(32, 4096, 1)),
    Load("prompt 1024", HttpLoad(_ALONE, 1024, 2, concurrency=1)),
]


def run(recorder: Recorder, *, tiny: bool) -> None:
    """Real shapes with random weights; `tiny`: a row of each; without a GPU all rows, tiny, of a tiny shape."""
    kinds = ["--rows", "itl", "throughput", "uniform", "prefill", "single"]
    if not torch.cuda.is_available():
        few = [each._replace(load=_few(each.load)) for each in LOADS]
        inside = measured_in_process(recorder, "tiny", [*kinds, *WITHOUT_GPU])
        worker: dict[str, str | bool] = {"device": "cpu", "attention-backend": "torch", "max-num-seqs": "4"}
        serve(recorder, "tiny", few, worker | {"load-format": "dummy"}, inside)
        return
    for name in SHAPES:
        loads = [each for each in LOADS if f"{name} {each.row}" in ROWS]
        inside = measured_in_process(recorder, name, kinds)
        serve(recorder, name, loads[:1] if tiny else loads, {"device": "cuda", "load-format": "dummy"}, inside)


def _few(load: HttpLoad) -> HttpLoad:
    sizes = (max(2, load.input_len // 64), max(2, load.output_len // 64))
    return HttpLoad(min(load.requests, 3), *sizes, load.spread, min(load.concurrency, 2))


def serve(
    recorder: Recorder,
    name: str,
    loads: list[Load],
    worker: dict[str, str | bool],
    inside: Mapping[str, Mapping[str, float]],
) -> None:
    """A line for each load as soon as it is measured: each runs twice, with other prompts, and the second counts."""
    with tempfile.TemporaryDirectory() as folder, recorder.attempt(f"{name} through the services"):
        model = write_config(Path(folder) / name, MODELS[name], CONTEXT)
        with contextlib.closing(LocalStack(stack_of(model, worker))) as stack:
            for index, each in enumerate(loads):
                title = f"{name} {each.row}"
                with recorder.attempt(f"{title} through the services"):
                    for turn in range(2):
                        found = replace(each.load, seed=2 * index + turn).put(stack.ready.http, Path(folder))
                    report_row(recorder, name, each, found, inside.get(title))


def report_row(
    recorder: Recorder, name: str, load: Load, found: Mapping[str, float], inside: Mapping[str, float] | None
) -> None:
    """A figure through the services beside what it is measured against, and what the services cost; None: nobody has
    measured it in process."""
    through, title = found[_SERVED[load.figure]], f"{name} {load.row}"
    figures: dict[str, Figure] = {"services": through}
    if (target := ROWS.get(title)) is not None:
        figures |= target.beside(through)
    if inside is not None:
        local = inside[load.figure]
        cost = 100 * (through / local - 1 if load.target.below else 1 - through / local)
        figures |= {"in_process": local, "cost_percent": cost, "cost_wanted": SERVICES_COST.wanted}
        figures["cost_reached"] = SERVICES_COST.beside(cost)["reached"]
    recorder.figure(f"{title}, {load.figure}", **figures, load_generator=LOAD_GENERATOR)
