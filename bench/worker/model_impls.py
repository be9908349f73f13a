"""`python -m bench.worker.model_impls`: compares a step of Quire's own code with one of the Transformers backend.

In each round, each implementation of `--model-impl` runs the same decode steps (some sequences, one row each) and the
same chunk of a prompt. Rounds alternate. The program prints the wall-clock time and the processor time of a step as
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Final

import torch

from bench import ROOT
from bench.worker.cpu_attention import decode_step, prefill_steps
from quire_worker.loading import LoadOptions, ModelImpl, load_model
from quire_worker.runner import ModelRunner
from quire_worker.step import StepBatch

IMPLS: Final[tuple[ModelImpl, ...]] = ("quire", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=184, help="longest; the others are up to 59 shorter")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50, help="steps of each kind per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runners = {
        impl: load_model(arguments.model, LoadOptions(kv_cache_bytes=512 << 20, model_impl=impl)).runner
        for impl in IMPLS
    }
    steps = {f"decode of {count}": decode_step(count, arguments.context) for count in arguments.sequences}
    (steps[f"prefill of {arguments.prompt}"],) = prefill_steps(arguments.prompt, arguments.prompt)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {impl: [] for impl in IMPLS} for name in steps}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            for impl in IMPLS:
                spent = step_ms(runners[impl], step, arguments.steps)
                if number:  # the first round compiles, and touches fresh memory
                    found[name][impl].append(spent)
    print(
        json.dumps(
            {
                "workload": {key: value for key, value in vars(arguments).items() if key != "model"},
                "load_average": os.getloadavg(),
                "wall_ms": {name: rounds_of(by_impl, 0) for name, by_impl in found.items()},
                "cpu_ms": {name: rounds_of(by_impl, 1) for name, by_impl in found.items()},
                "transformers_over_quire": {name: ratios(by_impl) for name, by_impl in found.items()},
            },
            indent=1,
        )
    )


def step_ms(runner: ModelRunner, step: StepBatch, count: int) -> tuple[float, float]:
    """Return the median of a step's wall-clock time, and the mean of the process's processor time for it."""
    walls = []
    spent = time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        runner.run(step)
        walls.append((time.perf_counter() - began) * 1e3)
    return statistics.median(walls), (time.process_time() - spent) * 1e3 / count


def rounds_of(by_impl: dict[str, list[tuple[float, float]]], which: int) -> dict[str, list[float]]:
    """Return one of the two times of each round, by implementation."""
    return {impl: [round(times[which], 3) for times in rounds] for impl, rounds in by_impl.items()}


def ratios(by_impl: dict[str, list[tuple[float, float]]]) -> list[float]:
    """Return the wall-clock time of transformers divided by Quire's own, round by round."""
    pairs = zip(by_impl["transformers"], by_impl["quire"], strict=True)
    return [round(theirs[0] / ours[0], 2) for theirs, ours in pairs]


if __name__ == "__main__":
    main()
