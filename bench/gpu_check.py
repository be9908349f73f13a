"""`make gpu-check STAGE=n`: whether the GPU worker is right, and how fast it is, in stages.

1  kernels and whole steps of every padded size up to 256 sequences and 2,048 tokens against float32 references
2  engines that must come to the same tokens
3  the in-process table beside vLLM's figures
4  the five services over HTTP, and cold starts
5  a soak of random requests, and each kernel against its floor
6  the table through the five services, beside the same in one process
7  KV pages from GPU to GPU, beside one plain copy (two GPUs)

Prints a JSON line for each check and adds a row to bench/LOG.md. Without a GPU a stage runs tiny, its kernels under
Triton's interpreter, or says what it skips; nothing is logged then.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_checks.interpreter import choose_interpreter
from bench.gpu_checks.record import Recorder

STAGES: dict[int, tuple[str, ...]] = {
    1: ("kernels",),
    2: ("engines",),
    3: ("table",),
    4: ("services",),
    5: ("soak", "roofline"),
    6: ("served_table",),
    7: ("peer_pull", "peer_workers"),
}
LOG = Path(__file__).parent / "LOG.md"


def main(argv: Sequence[str] | None = None) -> int:
    """0: every check holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=list(STAGES), required=True)
    parser.add_argument("--tiny", action="store_true", help="a few small cases; without a GPU always")
    parser.add_argument("--no-log", action="store_true", help="leave bench/LOG.md alone")
    args = parser.parse_args(argv)
    interpreted = choose_interpreter()
    recorder = Recorder(args.stage, _machine())
    tiny = args.tiny or interpreted
    for part in STAGES[args.stage]:
        importlib.import_module(f"bench.gpu_checks.{part}").run(recorder, tiny=tiny)
    if not (args.no_log or tiny):
        recorder.append_to(LOG)
    return 0 if recorder.good else 1


def _machine() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{platform.machine()}, no GPU"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
