"""Rows of the embedding table."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit
def embedding_kernel(token, table, out, hidden, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid [rows, blocks of hidden]: out[row] = table[token[row]] * scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < hidden
    wait(PDL)
    let_next_start(PDL)
    at = tl.load(token + row).to(tl.int64)
    value = tl.load(table + at * hidden + column, mask=real, other=0.0).to(tl.float32) * scale
    tl.store(out + row * hidden + column, value.to(out.dtype.element_ty), mask=real)
