"""`python -m bench.worker.cpu_attention`: compares both attention backends of the CPU worker on the same steps.

In each round, each backend runs the same decode step (many sequences, one row each) and the same prefill (one long
prompt, in chunks). Rounds alternate. The benchmark compares processor time, since machines are shared. It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from bench import ROOT
from quire_worker.loading import LoadOptions, load_model
from quire_worker.ops.backends import BACKENDS
from quire_worker.runner import ModelRunner
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch

_PAGE_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=184, help="longest; the others are up to 59 shorter")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10, help="decode steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runners: dict[str, ModelRunner] = {}
    load_s = {}
    for backend in BACKENDS:
        began = time.process_time()
        options = LoadOptions(kv_cache_bytes=512 << 20, page_size=_PAGE_SIZE, attention_backend=backend)
        runners[backend] = load_model(arguments.model, options).runner
        load_s[backend] = round(time.process_time() - began, 2)
    decode = decode_step(arguments.sequences, arguments.context)
    chunks = prefill_steps(arguments.prompt, arguments.chunk)
    found: dict[str, dict[str, list[float]]] = {"decode_step_ms": {}, "prefill_ms": {}}
    for number in range(arguments.rounds + 1):
        for backend, runner in runners.items():
            times = {
                "decode_step_ms": spent_ms(runner, [decode] * arguments.steps) / arguments.steps,
                "prefill_ms": spent_ms(runner, chunks),
            }
            for name, value in times.items():
                if number:  # the first round touches fresh memory
                    found[name].setdefault(backend, []).append(round(value, 2))
    medians = {name: {b: statistics.median(v) for b, v in by_backend.items()} for name, by_backend in found.items()}
    print(
        json.dumps(
            {
                "workload": {k: v for k, v in vars(arguments).items() if k != "model"},
                "cpu_time": found,
                "median": medians,
                "torch_over_cpu": {name: round(each["torch"] / each["cpu"], 2) for name, each in medians.items()},
                "load_cpu_s": load_s,
            },
            indent=1,
        )
    )


def spent_ms(runner: ModelRunner, steps: list[StepBatch]) -> float:
    """Return the processor time of the process."""
    began = time.process_time()
    for step in steps:
        runner.run(step)
    return (time.process_time() - began) * 1e3


def decode_step(sequences: int, context: int) -> StepBatch:
    """Return a step with one row per sequence, on pages in random places."""
    each = -(-(context + 1) // _PAGE_SIZE)
    table = np.random.default_rng(0).permutation(sequences * each) + 1
    position = context - np.arange(sequences) % 60
    return step_of(np.ones(sequences, np.int32), position.astype(np.int32), table.reshape(sequences, each))


def prefill_steps(prompt: int, chunk: int) -> list[StepBatch]:
    """Return the steps of one prompt, chunk by chunk."""
    table = np.arange(-(-prompt // _PAGE_SIZE))[None] + 1
    return [
        step_of(np.array([min(chunk, prompt - at)], np.int32), np.array([at], np.int32), table)
        for at in range(0, prompt, chunk)
    ]


def step_of(count: np.ndarray, position: np.ndarray, table: np.ndarray) -> StepBatch:
    """Return a greedy step with random tokens."""
    size = count.size
    return StepBatch(
        token=np.random.default_rng(1).integers(300, 4000, int(count.sum())),
        count=count,
        position=position,
        page_table=table.astype(np.int32),
        sample=np.ones(size, np.bool_),
        params=param_rows(size),
        logprobs=np.full(size, -1, np.int32),
    )


if __name__ == "__main__":
    main()
