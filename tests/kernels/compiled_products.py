"""`python -m tests.kernels.compiled_products [kinds]`: the H200's ways of products compiled, without a GPU.

Prints a line for each: what it is, the inner dimension (of a gated one how many gates, too), and the bytes of shared
memory that it takes. `kinds`: only the first of each kind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

import quire_worker.ops.triton.product_tables as tables
from quire_worker.ops.triton.gated_products import Gated
from quire_worker.ops.triton.kernels.gated_product import gated_product_kernel
from quire_worker.ops.triton.kernels.product import gemv_kernel, split_product_kernel, tall_product_kernel
from quire_worker.ops.triton.products import Gemv, Way
from tests.kernels.compiled import HOPPER

TYPES = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "y": "*bf16", "rows": "i32", "outputs": "i32"}


def compile_way(way: Way, rows: int, inputs: int) -> int:
    """Bytes of shared memory."""
    constants: dict[str, Any] = {"INPUTS": inputs, "BLOCK_N": way.block_n, "BLOCK_K": way.block_k}
    constants |= {"BIASED": False, "PDL": True}
    kernel: Any = gemv_kernel
    if isinstance(way, Gemv):
        constants["M"] = rows
    else:
        kernel = tall_product_kernel if way.shares == 1 else split_product_kernel
        constants |= {"M": way.columns, "STAGES": way.stages}
        constants |= {} if way.shares == 1 else {"SHARES": way.shares}
    types = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
    # Where torch allocates, and sizes of real models, are multiples of 16.
    names = [name for name in TYPES if name in kernel.arg_names and name != "rows"]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    source = ASTSource(kernel, types, constants, aligned)
    done = triton.compile(source, target=HOPPER, options={"num_warps": way.warps, "launch_pdl": True})
    return int(done.metadata.shared)


def compile_gated(way: Gated, inner: int, inputs: int) -> int:
    """Bytes of shared memory."""
    constants: dict[str, Any] = {
        "INNER": inner, "INPUTS": inputs, "BLOCK_M": way.block_m, "BLOCK_N": way.block_n, "BLOCK_K": way.block_k,
        "GROUP": way.group, "PROGRAMS": way.programs, "STAGES": way.stages, "GELU": False, "PDL": True,
    }  # fmt: skip  # pairs
    types = dict.fromkeys(constants, "constexpr") | {
        "x": f"tensordesc<bf16[{way.block_m}, {way.block_k}]>",
        "weight": f"tensordesc<bf16[2, {way.block_n}, {way.block_k}]>",
        "y": f"tensordesc<bf16[{way.block_m}, {way.block_n}]>",
        "rows": "i32",
    }
    kernel: Any = gated_product_kernel
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    done = triton.compile(source, target=HOPPER, options={"num_warps": way.warps, "launch_pdl": True})
    return int(done.metadata.shared)


def main() -> None:
    table = tables.read_table(Path(tables.__file__).parent / "h200.json")
    seen = set()
    for (rows, _, inputs), way in table.items():
        kind = (type(way).__name__, getattr(way, "shares", 1) > 1, rows == 1)
        key = kind if "kinds" in sys.argv else (rows if isinstance(way, Gemv) else 0, inputs, way)
        if key not in seen:
            seen.add(key)
            print(way, inputs, compile_way(way, rows, inputs), flush=True)
    gated = [
        (way, outputs // 2, inputs)
        for (_, outputs, inputs), way in tables.gated_table_of("NVIDIA H200").items()
        if way is not None
    ]
    for each, inner, inputs in [*dict.fromkeys(gated)][: 1 if "kinds" in sys.argv else None]:
        print(each, inner, inputs, compile_gated(each, inner, inputs), flush=True)


if __name__ == "__main__":
    main()
