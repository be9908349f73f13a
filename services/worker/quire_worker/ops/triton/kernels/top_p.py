"""Applies top_p to rows that have no other limit but min_p: checks whether the sampled token lies in the top-p set, and
samples again if not.

No threshold is searched. The row samples from all tokens that min_p keeps. The token lies in the top-p set if the
tokens with strictly larger logits weigh less than top_p. Since the token has the best score of all, it then also has
the best score of the top-p set. Otherwise the row samples again from the tokens with strictly larger logits, which
contain the top-p set. This is rare: with a top_p of 0.9, one row in ten. So all programs compute the first check, and
one program does the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait
from quire_worker.ops.triton.kernels.row import (
    LEAST_KEPT,
    MOST_KEPT,
    PARAM,
    RANGE,
    TOP_P_LEFT,
    random_key,
    row_logits,
    sampling_param,
)
from quire_worker.ops.triton.kernels.sample import best_of, winner


@triton.jit
def top_p_mass_kernel(
    logits,
    param_rows,
    blocked,
    stop_id,
    ranges,
    part_score,
    part_token,
    part_mass,
    control,
    changed,
    allowed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, SHARES]: part_mass [rows, 2, SHARES] takes, for BLOCK tokens of the vocabulary, the mass of logits
    strictly larger than the sampled token's, and the mass of all kept tokens. Nothing is written for a row without a
    top_p to apply, or whose best score is infinite. Other arguments are as in top_p_kernel."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    p = tl.load(ranges + row * RANGE + TOP_P_LEFT)
    if p >= 1.0:
        return
    token = share * BLOCK + tl.arange(0, BLOCK)
    x = row_logits(logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED)
    best, chosen = winner(part_score, part_token, row, PARTS, LANES)
    if tl.abs(best) == float("inf"):
        return
    heat = sampling_param(param_rows, row, PARAM.temperature)
    cut, most = tl.load(ranges + row * RANGE + LEAST_KEPT), tl.load(ranges + row * RANGE + MOST_KEPT)
    bound = row_logits(
        logits, row, chosen, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
    )
    weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
    out = part_mass + row * (2 * SHARES) + share
    tl.store(out, tl.sum(tl.where(x > bound, weight, 0.0), axis=0))
    tl.store(out + SHARES, tl.sum(weight, axis=0))


@triton.jit
def top_p_kernel(
    logits,
    param_rows,
    blocked,
    stop_id,
    ranges,
    position,
    part_score,
    part_token,
    part_mass,
    control,
    changed,
    allowed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: in rows to which top_p is still to be applied, takes the best token of all parts, and replaces it if
    top_p drops it. While the token lies outside the top-p set, the row samples again from the tokens with strictly
    larger logits.

    ranges [rows, RANGE] as top_k_top_p_kernel leaves them, part_score and part_token [rows, PARTS] as sample_kernel
    does, part_mass as top_p_mass_kernel. If the token is replaced, part_score gets the new score at place 0 and -inf at
    all others, and part_token gets the new token. A row whose best score is infinite stays unchanged. LANES and
    SHARE_LANES: powers of two, at least PARTS and SHARES.
    """
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    p = tl.load(ranges + row * RANGE + TOP_P_LEFT)
    if p >= 1.0:
        return
    best, chosen = winner(part_score, part_token, row, PARTS, LANES)
    if tl.abs(best) == float("inf"):
        return
    heat = sampling_param(param_rows, row, PARAM.temperature)
    cut, most = tl.load(ranges + row * RANGE + LEAST_KEPT), tl.load(ranges + row * RANGE + MOST_KEPT)
    share = tl.arange(0, SHARE_LANES)
    above = tl.load(part_mass + row * (2 * SHARES) + share, mask=share < SHARES, other=0.0)
    every = tl.load(part_mass + row * (2 * SHARES) + SHARES + share, mask=share < SHARES, other=0.0)
    wanted = p * tl.sum(every, axis=0)
    bound = row_logits(
        logits, row, chosen, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
    )
    # The largest logit is always kept.
    outside = (tl.sum(above, axis=0) >= wanted) & (bound < most)
    if not outside:
        return
    key, sample = random_key(param_rows, row)
    at = tl.load(position + row)
    place = tl.arange(0, BLOCK)
    while outside:
        best = tl.full([], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + place
            x = row_logits(
                logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
            )
            x = tl.where(x > bound, x, float("-inf"))
            score, its_token = best_of(x, token, 1.0 / heat, cut, key, at, sample, True)
            if score > best:
                best, chosen = score, its_token
        bound = row_logits(
            logits, row, chosen, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
        )
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = row_logits(
                logits,
                row,
                start + place,
                blocked,
                stop_id,
                control,
                changed,
                allowed,
                vocab,
                stops,
                CONTROLLED,
                MASKED,
            )
            mass += tl.where((x > bound) & (x >= cut), tl.exp((x - most) / heat), 0.0)
        outside = (tl.sum(mass, axis=0) >= wanted) & (bound < most)
    lane = tl.arange(0, LANES)
    tl.store(part_score + row * PARTS + lane, tl.where(lane == 0, best, float("-inf")), mask=lane < PARTS)
    tl.store(part_token + row * PARTS + lane, chosen, mask=lane < PARTS)
