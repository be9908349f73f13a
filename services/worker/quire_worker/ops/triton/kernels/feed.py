"""Collects a step's input tokens. The host knows some of them; the others were sampled in a slot and never left the
device. For these rows the device also corrects positions that the host does not know."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit
def feed_kernel(token, fed, sequence, slot, last_token, out, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid [blocks of rows]: out[r] = last_token[slot[sequence[r]]] where fed[r], or 0 if that slot is negative; else
    token[r]."""
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


@triton.jit(do_not_specialize=["rows", "splits_count"])
def place_kernel(
    mask_slot,
    slot,
    first_row,
    bound,
    min_len,
    known,
    held,
    fed,
    position,
    row_position,
    sample_position,
    last,
    blocked,
    splits,
    rows,
    splits_count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks]: replaces the greatest possible positions by the true ones, in rows that decode by a grammar: those
    whose mask_slot is not -1, and whose first token is fed.

    Columns by sequence, [rows]: mask_slot, -1 without a grammar; slot; first_row of its tokens; bound and min_len as in
    StepBatch. The kernel writes position, sample_position, last (1 if sample_position reaches bound) and blocked (1 if
    it is below min_len). By token, it writes fed and row_position; a token that is fed for the second time gets fed 2,
    any other 1. By slot, it reads known, the position of the last token, and held, whether that token was computed
    before. splits [8, splits_count] as in kv_splits; the kernel moves their ends, so that no split has keys past the
    sequence.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    let_next_start(PDL)
    real = lane < rows
    row = tl.load(first_row + lane, mask=real, other=0)
    mine = real & (tl.load(mask_slot + lane, mask=real, other=-1) != -1)
    mine = mine & (tl.load(fed + row, mask=mine, other=0) != 0)
    at = tl.load(slot + lane, mask=mine, other=0)
    place = tl.load(known + at, mask=mine, other=0)
    again = tl.load(held + at, mask=mine, other=0) != 0
    tl.store(position + lane, place, mask=mine)
    tl.store(row_position + row, place, mask=mine)
    tl.store(sample_position + lane, place + 1, mask=mine)
    ends = place + 1 >= tl.load(bound + lane, mask=mine, other=0)
    tl.store(last + lane, ends.to(tl.int32), mask=mine)
    early = place + 1 < tl.load(min_len + lane, mask=mine, other=0)
    tl.store(blocked + lane, early.to(tl.int32), mask=mine)
    share = lane < splits_count
    owner = tl.load(splits + lane, mask=share, other=-1)
    share = share & (owner >= 0)
    share = share & (tl.load(mask_slot + owner, mask=share, other=-1) != -1)
    its = tl.load(known + tl.load(slot + owner, mask=share, other=0), mask=share, other=0)
    end = tl.load(splits + 2 * splits_count + lane, mask=share, other=0)
    tl.store(splits + 2 * splits_count + lane, tl.minimum(end, its + 1), mask=share)
    tl.store(fed + row, tl.where(again, 2, 1), mask=mine)
