"""Measures how long the kernels of a model's first steps take to compile, one after the other and in parallel, without
a GPU.

Run `python -m bench.gpu.compile` without TRITON_INTERPRET. It compiles the 0.6B shape's kernels for Hopper into an
empty cache, and then again into the cache that the first run left. Arms are separate processes that take turns. No
kernel runs; see gpu_host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from triton.runtime import driver

from bench.gpu.host import REPLACED, Driver
from bench.gpu.shapes import QWEN3_06B
from quire_worker.cuda.kernel_compiler import compile_together, go_through
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import Tiling
from quire_worker.cuda.step_size import kernel_sizes
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm_configs import gemm_configs_for
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.weights.parameter_store import ParameterStore

_SEQUENCES, _TOKENS, _AT_START = 512, 16_384, 32


def small_memory_body() -> StepBody:
    """Return two layers with the model's own sizes, on memory that is never written."""
    spec, here = dataclasses.replace(QWEN3_06B, layers=QWEN3_06B.layers[:2]), torch.device("cpu")
    store = ParameterStore(parameter_specs(spec), torch.bfloat16)
    ops = TritonOps(HeadShape.of(spec), here, gemm_configs_for("NVIDIA H200"))
    ops.pdl = True
    ops.kept_logits = torch.empty((_SEQUENCES + 128, spec.vocab_size), dtype=torch.bfloat16)
    pages = torch.empty(8, spec.kv_heads, len(spec.layers), 2, 64, spec.head_dim, dtype=torch.bfloat16)
    with torch.inference_mode():
        decoder = Decoder(spec, store, ops, 4096)
    return StepBody(decoder, pages, 1 << 21, 1280, 1024)


def one(threads: int) -> dict[str, float]:
    """Compile with this number of threads in this process. 1: one after the other, as launches do."""
    driver.set_active(Driver())
    for owner, name, instead in REPLACED[1:]:  # all but the compiler
        setattr(owner, name, instead)
    body = small_memory_body()
    tiling = Tiling.of(body.decoder.head_shape, body.pages.device)
    sizes = kernel_sizes(_SEQUENCES, _TOKENS, _AT_START)
    begin, used, busy = time.perf_counter(), _cpu_s(), _busy_s()
    tasks = compile_together(lambda: go_through(body, tiling, sizes, fresh=True), threads)
    took, used, busy = time.perf_counter() - begin, _cpu_s() - used, _busy_s() - busy
    again = time.perf_counter()
    compile_together(lambda: go_through(body, tiling, sizes, fresh=True), threads)
    failed = sum(task.exception() is not None for task in tasks)
    return {
        "kernels": len(tasks),
        "failed": failed,
        "s": round(took, 2),
        "cpu_s": round(used, 2),
        "others_cores": round((busy - used) / took, 2),
        "launches_s": round(time.perf_counter() - again, 3),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its assembler processes."""
    return sum(os.times()[:4])


def _busy_s() -> float:
    """Return the CPU seconds of the whole machine."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--one", type=int, default=0, help="this arm alone, in this process")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one)), flush=True)
        return
    for turn in range(asked.rounds):
        for threads in asked.threads:
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("empty", "full"):
                    command = [sys.executable, "-m", "bench.gpu.compile", "--one", str(threads)]
                    environment = os.environ | {"TRITON_CACHE_DIR": cache}
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    found = {"round": turn, "threads": threads, "cache": kind} | json.loads(done.stdout)
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
