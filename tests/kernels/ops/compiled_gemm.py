"""`python -m tests.kernels.ops.compiled_gemm [kinds]`: the H200's ways of products compiled, without a GPU.

Prints a line for each: what it is, the inner dimension (of a gated one how many gates, too), and the bytes of shared
memory that it takes. `kinds`: only the first of each kind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

import quire_worker.ops.triton.gemm_configs as tables
from quire_worker.ops.triton.gated_gemm import GatedGemmConfig
from quire_worker.ops.triton.gemm import GemmConfig, Gemv
from quire_worker.ops.triton.kernels.gated_gemm import gated_gemm_kernel
from quire_worker.ops.triton.kernels.gemm import gemv_kernel, split_k_gemm_kernel, tall_gemm_kernel
from tests.kernels.ops.compiled import HOPPER

TYPES = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "y": "*bf16", "rows": "i32", "outputs": "i32"}


def compile_way(config: GemmConfig, rows: int, inputs: int, *, gated: bool = False) -> int:
    """Bytes of shared memory. `gated`: with the activation of gates."""
    constants: dict[str, Any] = {"INPUTS": inputs, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    constants |= {"BIASED": False, "GATED": gated, "GELU": False, "PDL": True}
    kernel: Any = gemv_kernel
    if isinstance(config, Gemv):
        constants["M"] = rows
    else:
        kernel = tall_gemm_kernel if config.shares == 1 else split_k_gemm_kernel
        constants |= {"M": config.columns, "STAGES": config.stages}
        constants |= {} if config.shares == 1 else {"SHARES": config.shares}
    types = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
    # Where torch allocates, and sizes of real models, are multiples of 16.
    names = [name for name in TYPES if name in kernel.arg_names and name != "rows"]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    source = ASTSource(kernel, types, constants, aligned)
    done = triton.compile(source, target=HOPPER, options={"num_warps": config.warps, "launch_pdl": True})
    return int(done.metadata.shared)


def compile_gated(config: GatedGemmConfig, inner: int, inputs: int) -> int:
    """Bytes of shared memory."""
    constants: dict[str, Any] = {
        "INNER": inner, "INPUTS": inputs,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "GROUP": config.group, "PROGRAMS": config.programs, "STAGES": config.stages, "GELU": False, "PDL": True,
    }  # fmt: skip  # pairs
    types = dict.fromkeys(constants, "constexpr") | {
        "x": f"tensordesc<bf16[{config.block_m}, {config.block_k}]>",
        "weight": f"tensordesc<bf16[2, {config.block_n}, {config.block_k}]>",
        "y": f"tensordesc<bf16[{config.block_m}, {config.block_n}]>",
        "rows": "i32",
    }
    kernel: Any = gated_gemm_kernel
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    done = triton.compile(source, target=HOPPER, options={"num_warps": config.warps, "launch_pdl": True})
    return int(done.metadata.shared)


def main() -> None:
    table = tables.read_configs(Path(tables.__file__).parent / "h200.json")
    seen = set()
    gates = {shape[1:] for shape in tables.gated_configs_of("NVIDIA H200")}
    for (rows, outputs, inputs), config in table.items():
        kind = (type(config).__name__, getattr(config, "shares", 1) > 1, rows == 1)
        key = kind if "kinds" in sys.argv else (rows if isinstance(config, Gemv) else 0, outputs, inputs, config)
        if key not in seen:
            seen.add(key)
            print(config, inputs, compile_way(config, rows, inputs), flush=True)
            if "kinds" in sys.argv or (outputs, inputs) in gates:
                print("gated", config, inputs, compile_way(config, rows, inputs, gated=True), flush=True)
    gated = [
        (config, outputs // 2, inputs)
        for (_, outputs, inputs), config in tables.gated_configs_of("NVIDIA H200").items()
        if config is not None
    ]
    for each, inner, inputs in [*dict.fromkeys(gated)][: 1 if "kinds" in sys.argv else None]:
        print(each, inner, inputs, compile_gated(each, inner, inputs), flush=True)


if __name__ == "__main__":
    main()
