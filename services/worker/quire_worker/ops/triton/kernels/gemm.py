"""GEMMs of few rows with a large weight, y = x @ weight.T. Their time is the time to read the weight once.

There are three kernels, and a measured table chooses one by shape (see gemm.py of the parent folder). The first sums
along each row of the weight, for one or two rows of x, and reads the first tile of the weight before it waits for x.
The second uses matrix instructions, with the weight as the tall operand. The third is like the second, but the warps of
a program split the inner dimension; it is for weights with few outputs.

With GATED, the kernels compute a gated linear layer. The first half of the weight's rows computes the gates, and the
second half computes as many ups, the values that the gates multiply: y = activation(gates) * ups [rows, outputs / 2].
The activation is silu, or gelu in its tanh form with GELU. A program computes gates together with their ups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.activation import activate
from quire_worker.ops.triton.kernels.common import let_next_start, operand, wait


@triton.jit
def _weight_rows(outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the numbers of the weight's rows [BLOCK_N] that this program multiplies, and which of them exist. With
    GATED, these are BLOCK_N / 2 gates, and then their ups."""
    each = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        gate = tl.program_id(0) * HALF + each % HALF
        return each // HALF * (outputs // 2) + gate, gate < outputs // 2
    else:
        n = tl.program_id(0) * BLOCK_N + each
        return n, n < outputs


@triton.jit
def _store_result(
    result,
    bias,
    y,
    rows,
    outputs,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Add the bias if BIASED, apply the activation and multiply if GATED, and write the result to y. BIASED and GATED
    exclude each other. `result` [BLOCK_N, M] float32 belongs to the rows of the weight that `_weight_rows` returns; its
    columns from `rows` on are padding."""
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    m, n = tl.arange(0, M), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    columns = outputs // 2 if GATED else outputs
    if BIASED:
        result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = result.reshape(2, WIDTH, M).permute(1, 2, 0).split()
        result = activate(gate, GELU) * up
    target = y + m[None, :] * columns + n[:, None]
    tl.store(target, result.to(y.dtype.element_ty), mask=(m < rows)[None, :] & (n < columns)[:, None])


@triton.jit
def gemv_kernel(
    x,
    weight,
    bias,
    y,
    outputs,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of outputs]: y [M, outputs] = x [M, INPUTS] @ weight.T, plus the bias if BIASED, for M = 1 or 2, by
    sums over the rows of weight [outputs, INPUTS]. BLOCK_K divides INPUTS. GATED, GELU: see the module."""
    n, exists = _weight_rows(outputs, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    real = exists[:, None]
    row = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    tile = tl.load(row, mask=real, other=0.0)
    wait(PDL)
    let_next_start(PDL)
    first = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        following = tl.load(row + start + BLOCK_K, mask=real & (start + BLOCK_K < INPUTS), other=0.0)
        wide = tile.to(tl.float32)
        first += wide * tl.load(x + start + k).to(tl.float32)[None, :]
        if M == 2:
            second += wide * tl.load(x + INPUTS + start + k).to(tl.float32)[None, :]
        tile = following
    result = tl.sum(first, axis=1)[:, None]
    if M == 2:
        result = tl.join(tl.sum(first, axis=1), tl.sum(second, axis=1))
    _store_result(result, bias, y, M, outputs, M, BLOCK_N, BIASED, GATED, GELU)


@triton.jit
def tall_gemm_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of outputs]: y [rows, outputs] = x [rows, INPUTS] @ weight.T, plus the bias if BIASED, by matrix
    instructions. Weight tiles are the tall operand, and x, transposed and padded to M columns, is the narrow one.
    BLOCK_K divides INPUTS. GATED, GELU: see the module."""
    n, exists = _weight_rows(outputs, BLOCK_N, GATED)
    m = tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    row = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    column = x + m[None, :] * INPUTS + k[:, None]
    used = (m < rows)[None, :]
    wait(PDL)
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        tile = tl.load(row + start, mask=exists[:, None], other=0.0)
        part = tl.load(column + start, mask=used, other=0.0)
        acc = tl.dot(operand(tile, weight.dtype.element_ty), operand(part, weight.dtype.element_ty), acc)
    let_next_start(PDL)
    _store_result(acc, bias, y, rows, outputs, M, BLOCK_N, BIASED, GATED, GELU)


@triton.jit
def split_k_gemm_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As tall_gemm_kernel, but every turn takes SHARES tiles of BLOCK_K inputs, which are summed at the end. SHARES *
    BLOCK_K divides INPUTS."""
    n, exists = _weight_rows(outputs, BLOCK_N, GATED)
    m = tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    share = tl.arange(0, SHARES)
    inner = share[:, None] * BLOCK_K + k[None, :]
    row = weight + n.to(tl.int64)[None, :, None] * INPUTS + inner[:, None, :]
    column = x + m[None, None, :] * INPUTS + inner[:, :, None]
    used = (m < rows)[None, None, :]
    wait(PDL)
    acc = tl.zeros([SHARES, BLOCK_N, M], tl.float32)
    for start in tl.range(0, INPUTS, SHARES * BLOCK_K, num_stages=STAGES):
        tile = tl.load(row + start, mask=exists[None, :, None], other=0.0)
        part = tl.load(column + start, mask=used, other=0.0)
        acc = tl.dot(operand(tile, weight.dtype.element_ty), operand(part, weight.dtype.element_ty), acc)
    let_next_start(PDL)
    _store_result(tl.sum(acc, axis=0), bias, y, rows, outputs, M, BLOCK_N, BIASED, GATED, GELU)
