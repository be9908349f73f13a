"""Measures the cost of a step on the worker's host without the model: microseconds of the model thread per step of
steady decode.

    python -m bench.worker.step [--steps 1000 --spares 0] [--beside ../other/checkout --starts 12 --rounds 4]

`launch` is the batch rule and the batch. `collect` is settling and the Report. `encode` is the Report as bytes, the
share of the writer thread. `device` is feeding tokens back and checking stops, the share of the device thread. No model
runs. The program also prints the time of a Grant that gives two pages to every row.

With `--beside`, a process of each checkout measures in turn, and both are started several times. The benchmark compares
the thread's own time of launch, collect and device for 256 rows. The ratio has bounds of 95 % by bootstrap over the
starts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from quire_common.credit import Budget, Grant, Start, encode_report
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop
from quire_worker.engine.engine import Engine
from quire_worker.engine.ports import StepOutcome
from quire_worker.engine.spec import EngineSpec
from quire_worker.engine.step_runner import StepRunner
from quire_worker.step import DeviceTiming, StepBatch, StepOutput

PAGE_SIZE, CONTEXT, PROMPT = 16, 2048, 100


class NullRunner:
    """Samples token 5 for every row, in no time."""

    def run(self, batch: StepBatch) -> StepOutput:
        return StepOutput(np.full(np.count_nonzero(batch.sample), 5, np.int32), None, DeviceTiming(0, 0, 0))


class TimedDevice:
    """Runs a step when its result is asked for, and measures its own time."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.spent_ns = 0
        self._runner = StepRunner(NullRunner())
        self._launched: list[StepBatch] = []
        self._ended: list[StepOutcome] = []

    def launch(self, batch: StepBatch) -> None:
        self._launched.append(batch)

    def end(self) -> None:
        began = time.perf_counter_ns()
        self._ended.append(self._runner.run(self._launched.pop(0)))
        self.spent_ns = time.perf_counter_ns() - began

    def prepare(self) -> bool:
        return False

    def take_outcomes(self) -> list[StepOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        self._launched, self._ended = [], []

    def close(self) -> None:
        self.drain()


def decoding(rows: int, spares: int) -> tuple[Engine, TimedDevice, EngineSpec, int]:
    """Return an engine whose rows are about to decode, its device and sizes, and the first page that no row has."""
    width = CONTEXT // PAGE_SIZE
    first_new = (rows + spares) * (width - 2) + 1
    spec = EngineSpec(rows, CONTEXT, 32000, PAGE_SIZE, first_new + 2 * rows, (2,))
    if hasattr(spec, "max_constrained_row_tokens"):  # a checkout without forced tokens does not know the field
        spec = replace(spec, max_constrained_row_tokens=8)
    device = TimedDevice()
    engine = Engine(spec, device)
    starts = [
        Start(
            slot=slot,
            order_key=slot,
            sequence=Sequence(np.arange(PROMPT, dtype=np.int32), Stop(100_000), Sampling(0.7, top_p=0.9, seed=slot)),
            cached_len=0,
            pages=(np.arange(1 + slot * (width - 2), 1 + (slot + 1) * (width - 2), dtype=np.int32),),
            limit=CONTEXT,
            context=RequestContext("r"),
            max_model_len=CONTEXT,
        )
        for slot in range(rows + spares)
    ]
    engine.apply(Grant(engine.epoch, 1, start=starts, budget=Budget(1 << 20, 1 << 20, 1 << 20, rows)))
    return engine, device, spec, first_new


def measure(rows: int, spares: int, steps: int) -> dict[str, float]:
    """Measure, and return medians."""
    engine, device, spec, first_new = decoding(rows, spares)
    spent: dict[str, list[int]] = {"launch": [], "collect": [], "encode": [], "device": []}
    engine.launch()
    for step in range(steps):
        times = [time.perf_counter_ns()]
        engine.launch()
        times.append(time.perf_counter_ns())
        device.end()
        times.append(time.perf_counter_ns())
        report = engine.collect()
        times.append(time.perf_counter_ns())
        if report is None or len(report.token) != rows + (step == 0) * spares:
            raise RuntimeError(f"step {step} is not what it should be")
        encode_report(report).SerializeToString()
        times.append(time.perf_counter_ns())
        if step > 10:
            for name, first in (("launch", 0), ("collect", 2), ("encode", 3)):
                spent[name].append(times[first + 1] - times[first])
            spent["device"].append(device.spent_ns)
    slots, pages = np.repeat(np.arange(rows, dtype=np.int32), 2), np.arange(first_new, spec.num_pages, dtype=np.int32)
    growth = Grant(engine.epoch, 2, grow_slot=slots, grow_group=np.zeros_like(slots), grow_page=pages)
    began = time.perf_counter_ns()
    engine.apply(growth)
    spent["growth"] = [time.perf_counter_ns() - began]
    return {name: statistics.median(values) / 1000 for name, values in spent.items()}


def step_us(steps: int) -> float:
    """Return the mean microseconds of this thread per step of 256 rows: launch, device and collect."""
    engine, device = decoding(256, 0)[:2]
    engine.launch()
    for step in range(steps):
        if step == 10:
            began_s = time.thread_time()
        engine.launch()
        device.end()
        engine.collect()
    return (time.thread_time() - began_s) / (steps - 10) * 1e6


def answer(steps: int) -> None:
    """Measure once for every line of the standard input."""
    for _ in sys.stdin:
        print(step_us(steps), flush=True)


def compare(other: Path, options: argparse.Namespace) -> None:
    """Print the ratio of this checkout's time to another checkout's time."""
    from bench.scheduler.core_step import ROOT, ask_by_turns, measuring, ratio

    took: dict[Path, list[float]] = {ROOT: [], other: []}
    for start in range(options.starts):
        with contextlib.ExitStack() as stack:
            flags = ["--steps", str(options.steps)]
            order = [*took][:: 1 - 2 * (start % 2)]
            children = {
                path: stack.enter_context(measuring(path, flags, __file__, ("common", "worker"))) for path in order
            }
            for path, us in ask_by_turns(children, order, options.rounds).items():
                took[path].append(us)
    for path, each in took.items():
        print(
            f"256 rows: median {statistics.median(each):.1f} us a step ({min(each):.1f}-{max(each):.1f}) [{path.name}]"
        )
    print(f"beside {other.name}: {ratio(took[ROOT], took[other])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--spares", type=int, default=0, help="started slots beyond the rows, in percent of them")
    parser.add_argument("--beside", type=Path, help="another checkout, its stubs generated")
    parser.add_argument("--starts", type=int, default=12, help="processes of each checkout, one after the other")
    parser.add_argument("--rounds", type=int, default=4, help="of each process, after one that warms up")
    parser.add_argument("--answer", action="store_true", help="measure when asked by the standard input")
    arguments = parser.parse_args()
    if arguments.answer:
        answer(arguments.steps)
        return
    if arguments.beside is not None:
        compare(arguments.beside.resolve(), arguments)
        return
    for rows in (64, 256):
        figures = measure(rows, rows * arguments.spares // 100, arguments.steps)
        host = figures["launch"] + figures["collect"] + figures["encode"]
        parts = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
        print(f"{rows} rows: {host:.0f} us of the host per step ({parts})")


if __name__ == "__main__":
    main()
