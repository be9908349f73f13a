"""A step's input tokens: those that the host knows, and those that were drawn in a slot and never left the device."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit
def feed_kernel(token, fed, sequence, slot, last_token, out, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid [blocks of rows]: out[r] = last_token[slot[sequence[r]]] where fed[r], else token[r]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    wait(PDL)
    let_next_start(PDL)
    known = tl.load(token + row, mask=real, other=0)
    from_slot = tl.load(fed + row, mask=real, other=0) != 0
    of = tl.load(sequence + row, mask=real, other=0)
    at = tl.load(slot + of, mask=from_slot, other=0)
    sampled = tl.load(last_token + at, mask=from_slot & (at >= 0), other=0)
    tl.store(out + row, tl.where(from_slot, sampled, known), mask=real)
