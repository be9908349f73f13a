"""y = activation(x @ gates.T) * (x @ ups.T) for many rows in one kernel: the GEMM, and the activation after it.

The intermediate result, which is twice as wide as y, never leaves the registers. A tile of the weight has gates and the
ups that they multiply side by side, so that one matrix instruction computes both. Each program computes one tile after
the other, and loads the next tile while the last one ends. This is Triton's persistent GEMM with descriptors (its
tutorial 09), for a weight of three dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.activation import activate
from quire_worker.ops.triton.kernels.common import let_next_start, operand, wait


@triton.jit
def _place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return the row tile and the column tile of tile number `tile`. Tiles that are computed at the same time share
    operands: GROUP tiles of rows, then the next column."""
    whole = GROUP * column_tiles
    first = tile // whole * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    return first + tile % whole % group, tile % whole // group


@triton.jit(do_not_specialize=["rows"])
def gated_gemm_kernel(
    x,
    weight,
    y,
    rows,
    INNER: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [PROGRAMS, or fewer if there are fewer tiles]: y = activation(x @ weight[0].T) * (x @ weight[1].T), silu or
    GELU's tanh form; each program computes every PROGRAMS-th tile.

    Descriptors: x [rows, INPUTS] with blocks [BLOCK_M, BLOCK_K], weight [2, INNER, INPUTS] with blocks [2, BLOCK_N,
    BLOCK_K], y [rows, INNER] with blocks [BLOCK_M, BLOCK_N]. Values outside a tensor are read as 0 and not written.
    """
    wait(PDL)
    let_next_start(PDL)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        m, n = _place(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in tl.range(0, (INPUTS + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
            a = x.load([m * BLOCK_M, k * BLOCK_K])
            b = weight.load([0, n * BLOCK_N, k * BLOCK_K]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(operand(a, x.dtype), tl.trans(operand(b, weight.dtype)), acc)
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        y.store([m * BLOCK_M, n * BLOCK_N], (activate(gate, GELU) * up).to(y.dtype))
