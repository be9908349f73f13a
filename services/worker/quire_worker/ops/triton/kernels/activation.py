"""Gated and plain activations, and the gate on attention's output, elementwise over rows."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit
def activate(x, GELU: tl.constexpr):
    """Compute silu of float32, or gelu in its tanh form."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # The tanh is computed by a sigmoid, which does not overflow at either end.
        return x * tl.sigmoid(2.0 * inner)
    else:
        return x * tl.sigmoid(x)


@triton.jit
def activation_kernel(
    source, out, inner, GATED: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid [rows, blocks of `inner`]: out [rows, inner] = activation(source [rows, inner]), silu or GELU's tanh form.
    GATED: source has [gate, up] of `inner` columns each, and out = activation(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < inner
    wait(PDL)
    let_next_start(PDL)
    if GATED:
        gate = tl.load(source + row * 2 * inner + column, mask=real, other=0.0).to(tl.float32)
        up = tl.load(source + row * 2 * inner + inner + column, mask=real, other=0.0).to(tl.float32)
        result = activate(gate, GELU) * up
    else:
        result = activate(tl.load(source + row * inner + column, mask=real, other=0.0).to(tl.float32), GELU)
    tl.store(out + row * inner + column, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def sigmoid_gate_kernel(x, gate, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid [rows, blocks of `columns`]: multiply x [rows, columns] by the sigmoid of gate, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    place = row * columns + column
    wait(PDL)
    let_next_start(PDL)
    factor = tl.sigmoid(tl.load(gate + place, mask=real, other=0.0).to(tl.float32))
    result = tl.load(x + place, mask=real, other=0.0).to(tl.float32) * factor
    tl.store(x + place, result.to(x.dtype.element_ty), mask=real)
