"""`python -m bench.cpu`: runs SmolLM2 on the CPU in Quire (in one process, and through the services), transformers and
llama.cpp.

All arms use the same model and number of threads, and take turns in each round. Three figures are measured in tokens/s:
prefill of 128 tokens, decode of one stream, and output of 16 streams (128 in, 64 out, prefill included). An arm's
figure is its best of three repeats, and the table shows medians over rounds. Memory is a process's peak; for `services`
it is the worker's memory at the end. llama.cpp needs its own environment (`pip install llama-cpp-python`), whose
interpreter is passed as `--llama-python`. `quire int8` quantizes weights when it loads them. It needs a folder with
safetensors, which the other programs do not read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from bench import ROOT
from bench.cpu import measures
from bench.harness.workload import Request
from bench.pipeline.services_arm import serve_requests
from quire.cli.output.terminal import table
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model

ARMS = ("quire", "quire int8", "services", "transformers float32", "transformers bfloat16", "llama.cpp")
FIGURES = ("prefill", "one_stream", "many_streams", "resident_mib")
Figures = dict[str, float]


def main() -> None:
    """Run the arms by turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a name of `quire models`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", help="an interpreter that has llama_cpp; without it llama.cpp is left out")
    parser.add_argument("--arms", nargs="+", default=[arm for arm in ARMS if arm != "quire int8"], choices=ARMS)
    arguments = parser.parse_args()
    arms = [arm for arm in arguments.arms if arm != "llama.cpp" or arguments.llama_python]
    model = str(find_model(arguments.model))
    results: dict[str, list[Figures]] = {arm: [] for arm in arms}
    for number in range(arguments.rounds):
        for arm in arms:
            figures = _run(arm, model, arguments.threads, arguments.llama_python)
            results[arm].append(figures)
            print(f"round {number + 1}, {arm}: {json.dumps({k: round(v, 1) for k, v in figures.items()})}", flush=True)
    medians = {arm: [statistics.median(each[f] for each in found) for f in FIGURES] for arm, found in results.items()}
    print(table(["arm", *FIGURES], [[arm, *(f"{each:.0f}" for each in found)] for arm, found in medians.items()]))


def _run(arm: str, model: str, threads: int, llama_python: str | None) -> Figures:
    if arm == "services":
        return _services(model, threads)
    name, _, option = arm.partition(" ")
    python = llama_python if name == "llama.cpp" else None
    module = f"bench.cpu.{name.replace('.', '_')}_arm"
    return _child([python or sys.executable, "-m", module, model, str(threads), *([option] if option else [])])


def _child(command: list[str]) -> Figures:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _services(model: str, threads: int) -> Figures:
    """All services as processes; the memory is the worker's RSS at the end."""
    flags = {"worker": {"torch-threads": str(threads), "kv-cache-memory-bytes": str(1 << 30)}}
    # A unique name, so that no KV pages of another run count as prefix-cache hits.
    stack = LocalStack(StackSpec(f"bench-cpu-{os.getpid()}-{time.monotonic_ns()}", model, flags=flags))
    try:
        figures = measures.measure(_serve_by(stack.grpc))
        state = stack.directory.read()
        if state is None:
            raise RuntimeError("the stack has left no state")
        worker = psutil.Process(state.services["worker"].pid)
        return figures | {"resident_mib": worker.memory_info().rss / (1 << 20)}
    finally:
        stack.close()


def _serve_by(address: str) -> Callable[[int, int, int], None]:
    def serve(seed: int, streams: int, output: int) -> None:
        requests = [Request(tuple(prompt), output) for prompt in measures.prompts(seed, streams)]
        asyncio.run(serve_requests(address, requests, streams))

    return serve


if __name__ == "__main__":
    main()
