"""`make gpu-check STAGE=n`: whether the GPU worker is right, and how fast it is, in stages.

1  kernels, ways of products and of gated products, whole steps of every padded size: against float32 references
2  engines that must come to the same tokens, and real models
3  the in-process table beside vLLM's figures, and what grammars cost
4  cold starts of the five services, and streams over HTTP
5  a soak of random requests, and each kernel against its floor
6  the table through the five services, beside the same in one process
7  KV pages from GPU to GPU, beside one plain copy (two GPUs)

Prints what fails, figures, a line for each part and one of JSON at the end; `--out` takes a JSON line for each check.
The entry of bench/LOG.md is there from the start on, for a stage that is killed. Without a GPU a stage runs tiny, its
kernels under Triton's interpreter, or says what it skips; nothing is logged then.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import LOG
from bench.gpu.record import Recorder
from bench.harness.bench_log import BenchLog
from tests.gpu.interpreter import choose_interpreter

# Parts by stage, each with the module that has its `run`.
STAGES: dict[int, dict[str, str]] = {
    1: {
        "products": "tests.gpu.products",
        "gated_products": "tests.gpu.gated_products",
        "kernels": "tests.gpu.kernels",
        "steps": "tests.gpu.steps",
    },
    2: {"engines": "tests.gpu.engines", "real_models": "tests.gpu.real_models"},
    3: {"table": "bench.gpu.table", "grammars": "bench.gpu.grammars"},
    4: {"cold_start": "bench.gpu.cold_start", "services": "bench.gpu.services"},
    5: {"soak": "tests.gpu.soak", "roofline": "bench.gpu.kernel_table.roofline"},
    6: {"served_table": "bench.gpu.served_table"},
    7: {"peer_pull": "bench.gpu.peers.pull", "peer_workers": "tests.gpu.peer_workers"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """0: every check holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=list(STAGES), required=True)
    parser.add_argument("--parts", nargs="+", help="of the stage's parts only these")
    parser.add_argument("--tiny", action="store_true", help="a few small cases; without a GPU always")
    parser.add_argument("--no-log", action="store_true", help="leave bench/LOG.md alone")
    parser.add_argument("--out", type=Path, help="file for a JSON line of each check")
    args = parser.parse_args(argv)
    parts = STAGES[args.stage]
    if unknown := sorted(set(args.parts or ()) - set(parts)):
        parser.error(f"stage {args.stage} has no {', '.join(unknown)}: its parts are {', '.join(parts)}")
    tiny = choose_interpreter() or args.tiny
    logged = not (args.no_log or tiny)
    recorder = Recorder(args.stage, _machine(), args.out, BenchLog(LOG) if logged else None)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        for part in args.parts or parts:
            with recorder.group(part):
                importlib.import_module(parts[part]).run(recorder, tiny=tiny)
    finally:
        signal.signal(signal.SIGTERM, before)
        recorder.end()
    return 0 if recorder.good else 1


def _terminated(number: int, _frame: object) -> None:
    """A time limit has passed, as a rule: leave by way of everybody's `finally`."""
    raise SystemExit(128 + number)


def _machine() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{platform.machine()}, no GPU"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
