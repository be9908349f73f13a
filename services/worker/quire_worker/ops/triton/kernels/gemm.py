"""GEMMs of few rows with a large weight, y = x @ weight.T. Their time is the time to read the weight once.

There are three kernels, and a measured table chooses one by shape (see gemm.py of the parent folder). The first sums
over the rows of the weight, for one or two rows of x, and reads the first tile of the weight before it waits for x. The
second uses matrix instructions, with the weight as the tall operand. The third is like the second, but the warps of a
program split the inner dimension; it is for weights with few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, operand, wait


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
    PDL: tl.constexpr,
):
    """Grid [blocks of outputs]: y [M, outputs] = x [M, INPUTS] @ weight.T, plus the bias if BIASED, for M = 1 or 2, by
    sums over the rows of weight [outputs, INPUTS]. BLOCK_K divides INPUTS."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = (n < outputs)[:, None]
    row = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    tile = tl.load(row, mask=real, other=0.0)
    wait(PDL)
    let_next_start(PDL)
    if M == 1:
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            following = tl.load(row + start + BLOCK_K, mask=real & (start + BLOCK_K < INPUTS), other=0.0)
            vector = tl.load(x + start + k).to(tl.float32)
            total += tile.to(tl.float32) * vector[None, :]
            tile = following
        result = tl.sum(total, axis=1)
        if BIASED:
            result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(y + n, result.to(y.dtype.element_ty), mask=n < outputs)
    else:
        first = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        second = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            following = tl.load(row + start + BLOCK_K, mask=real & (start + BLOCK_K < INPUTS), other=0.0)
            wide = tile.to(tl.float32)
            first += wide * tl.load(x + start + k).to(tl.float32)[None, :]
            second += wide * tl.load(x + INPUTS + start + k).to(tl.float32)[None, :]
            tile = following
        shift = tl.zeros([BLOCK_N], tl.float32)
        if BIASED:
            shift += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(y + n, (tl.sum(first, axis=1) + shift).to(y.dtype.element_ty), mask=n < outputs)
        tl.store(y + outputs + n, (tl.sum(second, axis=1) + shift).to(y.dtype.element_ty), mask=n < outputs)


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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of outputs]: y [rows, outputs] = x [rows, INPUTS] @ weight.T, plus the bias if BIASED, by matrix
    instructions. Weight tiles are the tall operand, and x, transposed and padded to M columns, is the narrow one.
    BLOCK_K divides INPUTS."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    row = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    column = x + m[None, :] * INPUTS + k[:, None]
    used = (m < rows)[None, :]
    wait(PDL)
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        tile = tl.load(row + start, mask=(n < outputs)[:, None], other=0.0)
        part = tl.load(column + start, mask=used, other=0.0)
        acc = tl.dot(operand(tile, weight.dtype.element_ty), operand(part, weight.dtype.element_ty), acc)
    let_next_start(PDL)
    if BIASED:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    target = y + m[None, :] * outputs + n[:, None]
    tl.store(target, acc.to(y.dtype.element_ty), mask=used & (n < outputs)[:, None])


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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As tall_gemm_kernel, but every turn takes SHARES tiles of BLOCK_K inputs, which are summed at the end. SHARES *
    BLOCK_K divides INPUTS."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
        tile = tl.load(row + start, mask=(n < outputs)[None, :, None], other=0.0)
        part = tl.load(column + start, mask=used, other=0.0)
        acc = tl.dot(operand(tile, weight.dtype.element_ty), operand(part, weight.dtype.element_ty), acc)
    let_next_start(PDL)
    result = tl.sum(acc, axis=0)
    if BIASED:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    target = y + m[None, :] * outputs + n[:, None]
    tl.store(target, result.to(y.dtype.element_ty), mask=(m < rows)[None, :] & (n < outputs)[:, None])
