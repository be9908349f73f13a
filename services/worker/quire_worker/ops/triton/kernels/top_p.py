"""top_p alone: whether a drawn token lies in the nucleus, and another draw where it does not.

No threshold is sought. The best of more tokens, where it is kept, is the best of those that are: so a row is drawn from
all that min_p leaves, and asked whether what is strictly larger than its token weighs less than top_p. If not, it is
drawn again from what is strictly larger, which the nucleus lies in. That is seldom: with a top_p of 0.9, of a tenth of
the rows; so the first question is put to all programs, and the rest is left to one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait
from quire_worker.ops.triton.kernels.row import TEMPERATURE, TOP_P, draw_number, is_top_p_only, random_key, row_logits
from quire_worker.ops.triton.kernels.sample import best_of, winner


@triton.jit
def top_p_mass_kernel(
    logits,
    draws,
    blocked,
    stop_id,
    largest,
    cutoff,
    part_score,
    part_token,
    part_mass,
    control,
    changed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, SHARES]: part_mass [rows, 2, SHARES] of BLOCK of the vocabulary: what is strictly larger than the
    drawn token, and all that is kept. Arguments and rows as in nucleus_kernel."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    if not is_top_p_only(draws, row, vocab):
        return
    token = share * BLOCK + tl.arange(0, BLOCK)
    x = row_logits(logits, row, token, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
    best, chosen = winner(part_score, part_token, row, PARTS, LANES)
    if tl.abs(best) == float("inf"):
        return
    heat, cut, most = draw_number(draws, row, TEMPERATURE), tl.load(cutoff + row), tl.load(largest + row)
    bound = row_logits(logits, row, chosen, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
    weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
    out = part_mass + row * (2 * SHARES) + share
    tl.store(out, tl.sum(tl.where(x > bound, weight, 0.0), axis=0))
    tl.store(out + SHARES, tl.sum(weight, axis=0))


@triton.jit
def top_p_kernel(
    logits,
    draws,
    blocked,
    stop_id,
    largest,
    cutoff,
    position,
    part_score,
    part_token,
    part_mass,
    control,
    changed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: the best of all parts in rows of top_p without top_k, replaced where it is not in the nucleus.

    largest [rows] and threshold [rows] as threshold_kernel leaves them, part_score and part_token [rows, PARTS] as
    draw_kernel does, part_mass as mass_kernel. LANES and SHARE_LANES: powers of two, at least PARTS and SHARES."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    if not is_top_p_only(draws, row, vocab):
        return
    best, chosen = winner(part_score, part_token, row, PARTS, LANES)
    if tl.abs(best) == float("inf"):
        return
    heat, cut, most = draw_number(draws, row, TEMPERATURE), tl.load(cutoff + row), tl.load(largest + row)
    p = draw_number(draws, row, TOP_P)
    share = tl.arange(0, SHARE_LANES)
    above = tl.load(part_mass + row * (2 * SHARES) + share, mask=share < SHARES, other=0.0)
    every = tl.load(part_mass + row * (2 * SHARES) + SHARES + share, mask=share < SHARES, other=0.0)
    wanted = p * tl.sum(every, axis=0)
    bound = row_logits(logits, row, chosen, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
    # The largest itself is always kept.
    outside = (tl.sum(above, axis=0) >= wanted) & (bound < most)
    if not outside:
        return
    key, sample = random_key(draws, row)
    at = tl.load(position + row)
    place = tl.arange(0, BLOCK)
    while outside:
        best = tl.full([], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + place
            x = row_logits(logits, row, token, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
            x = tl.where(x > bound, x, float("-inf"))
            score, its_token = best_of(x, token, 1.0 / heat, cut, key, at, sample, True)
            if score > best:
                best, chosen = score, its_token
        bound = row_logits(logits, row, chosen, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = row_logits(logits, row, start + place, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
            mass += tl.where((x > bound) & (x >= cut), tl.exp((x - most) / heat), 0.0)
        outside = (tl.sum(mass, axis=0) >= wanted) & (bound < most)
    lane = tl.arange(0, LANES)
    tl.store(part_score + row * PARTS + lane, tl.where(lane == 0, best, float("-inf")), mask=lane < PARTS)
    tl.store(part_token + row * PARTS + lane, chosen, mask=lane < PARTS)
