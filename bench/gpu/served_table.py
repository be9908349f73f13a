"""Stage 6: measures the rows of the in-process table again, through the five services over HTTP. The difference is the
cost of the services.

In process, the time between tokens is measured in steps in which all requests decode. Its counterpart is `decode_tpot`
of `quire bench serve`, which covers the same steps. For one request at a time, the counterpart is TPOT. TPOT of both is
also reported. A row that fails is a failed check; the other rows are still measured and reported.
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

SERVED = {
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
_MOST_TURNS = 8
"""Turns until so many count: a turn counts only if all its requests decode together for a while."""
_LEAST_WINDOW_S = 0.03
"""A figure of a shorter time, which has a few steps, would be chance."""


class Load(NamedTuple):
    """A row of `bench.gpu.engine`."""

    row: str
    load: HttpLoad

    @property
    def target(self) -> Target:
        """Return the small model's figures with which it is compared; the small model has all rows."""
        return ROWS[f"0.6B {self.row}"]

    @property
    def figure(self) -> str:
        """Return the name of the figure that counts in process, for any model."""
        return self.target.figure

    @property
    def served(self) -> str:
        """Return the corresponding figure through the services. For requests one after the other it is TPOT, since no
        other request has a prompt."""
        if self.figure != "itl_ms":
            return self.figure
        return "decode_tpot_ms" if self.together else "tpot_ms"

    @property
    def together(self) -> bool:
        """Whether the figure is of steps in which all requests decode."""
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
    """Run the real shapes with random weights; with `tiny` one row of each; without a GPU all rows with a tiny
    shape."""
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
    """Report a line for each load as soon as it is measured. Each load runs twice, with different prompts, and the
    second run counts. The measurement that needs the number of tokens of each event runs after that."""
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
    """Measure steps in which all requests decode, in several turns with different prompts, and the TPOT of these turns.
    A comparison with the other TPOT shows the cost of reporting tokens. Also return the CPU time of each service per
    token, prompts included. Raises RuntimeError if the requests did not all decode together in enough turns."""
    before = cpu_seconds(stack)
    turns: list[Mapping[str, float]] = []
    run, fullest = 0, 0.0
    while len(turns) < _COUNTED_TURNS and run < _MOST_TURNS:
        turn = replace(load, seed=100 + run, counted=True).put(stack.ready.http, folder)
        run += 1
        fullest = max(fullest, turn["decode_window_concurrency"])
        if turn["decode_window_concurrency"] == load.requests and turn["decode_window_s"] >= _LEAST_WINDOW_S:
            turns.append(turn)
    used = cpu_us_per_token(before, cpu_seconds(stack), run * load.requests * load.output_len)
    if len(turns) < _COUNTED_TURNS:
        raise RuntimeError(
            f"all {load.requests} requests decoded together for {_LEAST_WINDOW_S} s in {len(turns)} of {run} turns; "
            f"at most {fullest:.0f} did"
        )
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
    """Report a figure through the services, the figures to compare, and the cost of the services; None: there is no
    figure in process."""
    through, title = found[SERVED[load.served]], f"{name} {load.row}"
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
