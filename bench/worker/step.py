"""What a step costs the worker's host beside the model: microseconds of the model thread per step of steady decode.

`launch`: the batch rule and the batch. `collect`: settling and the Report. `encode`: the Report as bytes, the writer
thread's share. `device`: feeding back and checking stops, the device thread's share. No model runs. Beside them what a
Grant takes that gives two pages to every row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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
    """Draws token 5 for everybody, in no time."""

    def run(self, batch: StepBatch) -> StepOutput:
        return StepOutput(np.full(np.count_nonzero(batch.sample), 5, np.int32), None, DeviceTiming(0, 0, 0))


class TimedDevice:
    """Runs a step when it is looked for, and times itself."""

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


def measure(rows: int, spares: int, steps: int) -> dict[str, float]:
    """Medians."""
    width = CONTEXT // PAGE_SIZE
    first_new = (rows + spares) * (width - 2) + 1
    spec = EngineSpec(rows, CONTEXT, 32000, PAGE_SIZE, first_new + 2 * rows, (2,))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--spares", type=int, default=0, help="started slots beyond the rows, in percent of them")
    arguments = parser.parse_args()
    for rows in (64, 256):
        figures = measure(rows, rows * arguments.spares // 100, arguments.steps)
        host = figures["launch"] + figures["collect"] + figures["encode"]
        parts = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
        print(f"{rows} rows: {host:.0f} us of the host per step ({parts})")


if __name__ == "__main__":
    main()
