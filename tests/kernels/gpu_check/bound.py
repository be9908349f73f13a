"""`python -m tests.kernels.gpu_check.bound`: the kernel table of the real shapes, launched as on an H200, without one.

Triton's own launcher binds arguments and chooses what to compile; nothing is compiled or computed, and tensors have no
memory. Prints a line for each row: what it launches, what the table says of that, and its name. A process of its own,
since nothing can be computed in it any more.
"""

from __future__ import annotations

import torch

from bench.gpu import host
from bench.gpu.kernel_table import roofline
from bench.gpu.kernel_table.kernel_case import Bench
from bench.gpu.shapes import SHAPES
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm_configs import gemm_configs_for
from quire_worker.ops.triton.triton_ops import TritonOps


@torch.inference_mode()
def main() -> None:
    host.stand_in()
    nowhere = torch.device("meta")
    for name, spec in SHAPES.items():
        ops = TritonOps(HeadShape.of(spec), nowhere, gemm_configs_for("NVIDIA H200"))
        ops.pdl = True
        for where, case in roofline.cases(Bench(spec, ops, nowhere, torch.bfloat16, 64), small=False):
            host._launched.clear()
            case.run(0)
            print(len(host._launched), case.launches, f"{name} {where}, {case.name}", flush=True)


if __name__ == "__main__":
    main()
