"""RMS norm of rows. If there is a residual, it is added first."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit
def rms_norm_kernel(
    delta,
    residual,
    norm_weight,
    out,
    hidden,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: out = RMS norm of residual [rows, hidden] times norm_weight. With ADD, residual += delta first, in
    place, and the norm uses the sum as it is rounded to the memory's type."""
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    real = column < hidden
    scale = tl.load(norm_weight + column, mask=real, other=0.0).to(tl.float32)
    wait(PDL)
    let_next_start(PDL)
    x = tl.load(residual + row + column, mask=real, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row + column, mask=real, other=0.0).to(tl.float32)
        kept = x.to(residual.dtype.element_ty)
        tl.store(residual + row + column, kept, mask=real)
        x = kept.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out + row + column, (x * inverse * scale).to(out.dtype.element_ty), mask=real)
