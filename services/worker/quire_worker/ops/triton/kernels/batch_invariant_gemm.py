"""y = x @ weight.T with one order of summation for every element, for any number of rows of x.

All tiles have one size, and the inner dimension is not split. So the bits of a row do not depend on the other rows.
This kernel is slower than one that suits the number of rows; `--batch-invariant` selects it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, operand, wait


@triton.jit(do_not_specialize=["rows"])
def batch_invariant_gemm_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of rows, blocks of outputs]: y [rows, outputs] = x [rows, INPUTS] @ weight.T, plus the bias if
    BIASED, summed in float32 in one order. weight [outputs, INPUTS]; BLOCK_K divides INPUTS."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wait(PDL)
    let_next_start(PDL)
    left = x + m.to(tl.int64)[:, None] * INPUTS + k[None, :]
    right = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        a = tl.load(left + start, mask=(m < rows)[:, None], other=0.0)
        b = tl.load(right + start, mask=(n < outputs)[:, None], other=0.0)
        acc = tl.dot(operand(a, x.dtype.element_ty), tl.trans(operand(b, weight.dtype.element_ty)), acc)
    if BIASED:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])
