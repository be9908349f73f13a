"""Stage 6: the in-process table once more, through the five services over HTTP: what the pipeline costs.

What stands for the in-process time between tokens, of steps in which everybody decodes, is `decode_tpot` of
`quire bench serve`, of the same steps; for one request at a time that is TPOT. TPOT on both sides is told beside it.
A row that fails is a check that fails; the others are measured and told all the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from bench.gpu.engine import CONTEXT
from bench.gpu.figures import ITL, ROWS, SERVICES_COST, Target
from bench.gpu.http_load import LOAD_GENERATOR, HttpLoad, stack_of
from bench.gpu.model import write_config
from bench.gpu.record import Figure, Recorder
from bench.gpu.shapes import MODELS, SHAPES
from bench.gpu.table import WITHOUT_GPU, measured_in_process
from bench.pipeline.services_arm import cpu_seconds, cpu_us_per_token
from quire.local.stack import LocalStack

_SERVED = {
    "tpot_ms": "median_tpot_ms",
    "decode_tpot_ms": "median_decode_tpot_ms",
    "output_tok_s": "output_throughput",
    "input_tok_s": "input_throughput",
    "first_ms": "median_ttft_ms",
}
"""A figure of a row -> the same of `quire bench serve`."""
_CPU = "_cpu_us_per_token"
_COUNTED_TURNS = 3
"""Turns of which `decode_tpot` is the median."""


class Load(NamedTuple):
    """A row of `bench.gpu.engine`."""

    row: str
    load: HttpLoad

    @property
    def target(self) -> Target:
        """What it is measured against with the small model, which has all rows."""
        return ROWS[f"0.6B {self.row}"]

    @property
    def figure(self) -> str:
        """Which figure counts in process, whatever the model."""
        return self.target.figure

    @property
    def served(self) -> str:
        """The like of it through the services: of requests one after the other TPOT, since nobody else has a prompt."""
        if self.figure != "itl_ms":
            return self.figure
        return "decode_tpot_ms" if self.together else "tpot_ms"

    @property
    def together(self) -> bool:
        """Whether it is of steps in which all requests decode."""
        return self.figure == "itl_ms" and self.load.concurrency != 1


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
        few = [each._replace(load=_few(each)) for each in LOADS]
        inside = measured_in_process(recorder, "tiny", [*kinds, *WITHOUT_GPU])
        worker: dict[str, str | bool] = {"device": "cpu", "attention-backend": "torch", "max-num-seqs": "4"}
        serve(recorder, "tiny", few, worker | {"load-format": "dummy"}, inside)
        return
    for name in SHAPES:
        loads = [each for each in LOADS if f"{name} {each.row}" in ROWS]
        inside = measured_in_process(recorder, name, kinds)
        serve(recorder, name, loads[:1] if tiny else loads, {"device": "cuda", "load-format": "dummy"}, inside)


def _few(each: Load) -> HttpLoad:
    load, shorter = each.load, 1 if each.together else 64  # or the first has ended before the last begins
    sizes = (max(2, load.input_len // 64), max(2, load.output_len // shorter))
    return HttpLoad(min(load.requests, 3), *sizes, load.spread, min(load.concurrency, 2))


def serve(
    recorder: Recorder,
    name: str,
    loads: list[Load],
    worker: dict[str, str | bool],
    inside: Mapping[str, Mapping[str, float]],
) -> None:
    """A line for each load as soon as it is measured: each runs twice, with other prompts, and the second counts; what
    takes events that tell their tokens is measured after that."""
    with tempfile.TemporaryDirectory() as folder, recorder.attempt(f"{name} through the services"):
        model = write_config(Path(folder) / name, MODELS[name], CONTEXT)
        with contextlib.closing(LocalStack(stack_of(model, worker))) as stack:
            for index, each in enumerate(loads):
                title = f"{name} {each.row}"
                with recorder.attempt(f"{title} through the services"):
                    for turn in range(2):
                        found = replace(each.load, seed=2 * index + turn).put(stack.ready.http, Path(folder))
                    if each.together:
                        found |= _decoding(each.load, stack, Path(folder))
                    report_row(recorder, name, each, found, inside.get(title))


def _decoding(load: HttpLoad, stack: LocalStack, folder: Path) -> dict[str, float]:
    """Steps in which all of them decode, in several turns with other prompts, and the turns' TPOT: what it costs to be
    told of tokens is seen beside the other one. Also what CPU each service took for a token, their prompts included.
    Raises RuntimeError where they never all decoded."""
    before = cpu_seconds(stack)
    turns = [
        replace(load, seed=100 + turn, counted=True).put(stack.ready.http, folder) for turn in range(_COUNTED_TURNS)
    ]
    tokens = len(turns) * load.requests * load.output_len
    used = cpu_us_per_token(before, cpu_seconds(stack), tokens)
    fewest = min(turn["decode_window_concurrency"] for turn in turns)
    if fewest < load.requests:
        raise RuntimeError(f"of {load.requests} requests at most {fewest} decoded together")
    decoding = [turn["median_decode_tpot_ms"] for turn in turns]
    return {
        "median_decode_tpot_ms": median(decoding),
        "least_decode_tpot_ms": min(decoding),
        "most_decode_tpot_ms": max(decoding),
        "counted_tpot_ms": median(turn["median_tpot_ms"] for turn in turns),
        **{f"{service}{_CPU}": each for service, each in used.items()},
    }


def report_row(
    recorder: Recorder, name: str, load: Load, found: Mapping[str, float], inside: Mapping[str, float] | None
) -> None:
    """A figure through the services beside what it is measured against, and what the services cost; None: nobody has
    measured it in process."""
    through, title = found[_SERVED[load.served]], f"{name} {load.row}"
    figures: dict[str, Figure] = {"services": through}
    if (target := ROWS.get(title)) is not None:
        figures |= target.beside(through)
    if inside is not None:
        local = inside[load.figure]
        cost = _cost_percent(load.target, through, local)
        figures |= {"in_process": local, "cost_percent": cost, "cost_wanted": SERVICES_COST.wanted}
        figures["cost_reached"] = SERVICES_COST.beside(cost)["reached"]
    if load.together:
        figures |= {each: found[f"{each}_decode_tpot_ms"] for each in ("least", "most")}
        figures |= {"tpot_ms": found["median_tpot_ms"], "tpot_counted_ms": found["counted_tpot_ms"]}
        figures |= {figure: round(value, 1) for figure, value in found.items() if figure.endswith(_CPU)}
    if load.figure == "itl_ms" and inside is not None and (tpot := inside["tpot_ms"]):
        cost = _cost_percent(load.target, found["median_tpot_ms"], tpot)
        figures |= {"in_process_tpot_ms": tpot, "tpot_cost_percent": cost}
    recorder.figure(f"{title}, {load.served}", **figures, load_generator=LOAD_GENERATOR)


def _cost_percent(target: Target, through: float, local: float) -> float:
    return 100 * (through / local - 1 if target.below else 1 - through / local)
