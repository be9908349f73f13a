"""`python -m bench.scheduler.delay`: measures the decode throughput of scheduler and worker processes, with a delay
between the two.

The worker is paced: its steps take a given time. So the best possible throughput is rows / step time, and any shortfall
is due to scheduling. In each round, and for each delay, the benchmark runs the same requests in lockstep and then
free-running. After that it runs free-running alone, with few spare slots or pages. Every answer is compared with the
undisturbed one. The program prints a table. It writes all rounds to `--json FILE` and a picture to `--svg FILE`. On a
busy machine, figures of short steps mean little, because four processes share the available cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.scheduler.delay_driver import Measured, measure
from bench.scheduler.delay_plot import Point, svg
from bench.scheduler.delay_stack import DelayStack
from bench.scheduler.delay_workload import DelayWorkload, pages_needed

_RAMP_STEPS, _LEAST_STEPS = 60, 100
_RAMP_S = 1.0
MODES = ("free", "lockstep")
SCARCE = (1.0, 1.25, 1.5, 2.0, 2.5)


@dataclass(frozen=True, order=True)
class Cell:
    """One setting. `slots` is a multiple of the rows, and `pages` is a multiple of the pages that they need; 0:
    plenty."""

    part: str
    step_ms: float
    rows: int
    delay_ms: float
    mode: str
    slots: float = 0.0
    pages: float = 0.0


Results = dict[Cell, list[Measured]]


def main() -> int:
    arguments = _parser().parse_args()
    results: Results = {}
    work = DelayWorkload()
    for group in groups(arguments):
        run_group(group, arguments, work, results)
    print(table(results))
    if arguments.json:
        lines = [{**asdict(cell), "rounds": [asdict(m) for m in rounds]} for cell, rounds in results.items()]
        Path(arguments.json).write_text(json.dumps(lines, indent=1), encoding="utf-8")
    if arguments.svg:
        medians = {
            Point(cell.rows, cell.step_ms, cell.mode, cell.delay_ms): statistics.median(m.efficiency for m in rounds)
            for cell, rounds in results.items()
            if cell.part == "grid"
        }
        Path(arguments.svg).write_text(svg(medians), encoding="utf-8")
    return 0


def groups(arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Return groups of cells that take turns, on stacks that exist at the same time."""
    if "grid" in arguments.parts:
        for step_ms in arguments.step_ms:
            for rows in arguments.rows:
                yield [Cell("grid", step_ms, rows, d, mode) for d in arguments.delay_ms for mode in arguments.modes]
    scarce = (arguments.scarce_step_ms, arguments.scarce_rows, arguments.scarce_delay_ms)
    if "slots" in arguments.parts:
        yield [Cell("slots", *scarce, "free", slots=share) for share in SCARCE]
    if "pages" in arguments.parts:
        yield [Cell("pages", *scarce, "free", pages=share) for share in SCARCE]


def run_group(cells: list[Cell], arguments: argparse.Namespace, work: DelayWorkload, results: Results) -> None:
    """Run each cell once per round."""
    with ExitStack() as alive:
        stacks: dict[tuple[str, float, float], DelayStack] = {}
        for cell in cells:
            key = (cell.mode, cell.slots, cell.pages)
            if key not in stacks:
                stacks[key] = alive.enter_context(_stack(cell))
        for number in range(arguments.rounds):
            for cell in cells:
                stack = stacks[cell.mode, cell.slots, cell.pages]
                stack.set_delay(cell.delay_ms)
                ramp_s = max(_RAMP_S, _RAMP_STEPS * cell.step_ms / 1e3)
                seconds = max(arguments.seconds, _LEAST_STEPS * cell.step_ms / 1e3)
                found = measure(stack, work, cell.rows, cell.step_ms, ramp_s, seconds)
                results.setdefault(cell, []).append(found)
                print(f"round {number + 1}: {cell} {found.efficiency:.3f}", file=sys.stderr)


def _stack(cell: Cell) -> DelayStack:
    return DelayStack(
        cell.step_ms,
        cell.rows,
        lockstep=cell.mode == "lockstep",
        num_slots=round(cell.slots * cell.rows),
        pages=round(cell.pages * pages_needed(cell.rows)),
    )


def table(results: Results) -> str:
    """Return one line per cell: medians, and the least and the greatest efficiency of the rounds."""
    lines = [
        "part   step ms  rows  delay ms  mode      slots  pages  of ideal [least, most]    busy   fill  "
        "us/step: scheduler  worker  longest gap ms  answers checked"
    ]
    for cell, rounds in results.items():
        shares = [m.efficiency for m in rounds]
        busy, fill, scheduler, worker, gap = (
            statistics.median(getattr(m, name) for m in rounds)
            for name in ("busy", "fill", "scheduler_us_per_step", "worker_us_per_step", "longest_gap_ms")
        )
        lines.append(
            f"{cell.part:6} {cell.step_ms:7g} {cell.rows:5} {cell.delay_ms:9g}  {cell.mode:8} "
            f"{cell.slots or '-':>6} {cell.pages or '-':>6}    {statistics.median(shares):.3f} "
            f"[{min(shares):.3f}, {max(shares):.3f}]  {busy:6.3f} {fill:6.3f} {scheduler:19.0f} {worker:7.0f} "
            f"{gap:15.1f} {sum(m.checked for m in rounds):16}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["grid", "slots", "pages"], choices=("grid", "slots", "pages"))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.6, 2.0, 5.0, 12.0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0, 1.0, 5.0, 20.0], help="each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one window; at least 100 steps are measured")
    parser.add_argument("--scarce-step-ms", type=float, default=5.0)
    parser.add_argument("--scarce-rows", type=int, default=64)
    parser.add_argument("--scarce-delay-ms", type=float, default=5.0)
    parser.add_argument("--json", default="", help="file for all rounds")
    parser.add_argument("--svg", default="", help="file for a picture of the grid")
    return parser


if __name__ == "__main__":
    sys.exit(main())
