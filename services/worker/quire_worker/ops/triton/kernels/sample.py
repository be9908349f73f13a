"""Samples tokens from logits. One pass adds Gumbel noise and takes the argmax; a second kernel feeds the token back and
checks stops.

The token has the largest x / temperature + noise among the logits that the limits keep (top_k_top_p.py), and the lowest
id among equals. This is the definition of sampling/sampler.py, with float32 in place of float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker import step
from quire_worker.ops.triton.kernels.common import fast_log, let_next_start, wait
from quire_worker.ops.triton.kernels.mask import HAS_MASK, HELD
from quire_worker.ops.triton.kernels.row import (
    GREEDY_BELOW,
    LEAST_KEPT,
    MOST_KEPT,
    PARAM,
    RANGE,
    random_key,
    row_logits,
    sampling_param,
)

# How far a rough score may lie from the exact one: the error of its noise, and rounding in proportion to the score.
_SLACK: tl.constexpr = tl.constexpr(1e-3)
_SLACK_OF_SCORE: tl.constexpr = tl.constexpr(1e-6)
# Up to this number of kept tokens of a block are scored exactly at once.
_IN_TURN: tl.constexpr = tl.constexpr(4)
_DAMAGED: tl.constexpr = tl.constexpr(step.DAMAGED)
_NOTHING_LEFT: tl.constexpr = tl.constexpr(step.NOTHING_LEFT)
_HELD_TOKEN: tl.constexpr = tl.constexpr(step.HELD)
_NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def sample_kernel(
    logits,
    param_rows,
    maximum,
    ranges,
    position,
    blocked,
    stop_id,
    part_score,
    part_token,
    control,
    changed,
    allowed,
    vocab,
    stops,
    groups,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, PARTS]: the best token of BLOCK tokens of the vocabulary, and its score; NaN if a logit is NaN. The
    score is the logit of a greedy row, else logit / temperature + Gumbel noise.

    position [rows] is the absolute index of the sampled token. FILTERED: in rows that are not greedy, only logits in
    the row's range, ranges [rows, RANGE], count. If a row has a range, the kernel also reads maximum [rows, groups],
    with GROUPS groups per part. If no group reaches the range, the part reads no logits, and its score is -inf. In rows
    that are not greedy, a part without a token has the token 2147483647. ranges, control and changed are as in
    top_k_top_p_kernel.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    cut = tl.full([], float("-inf"), tl.float32)
    if FILTERED:
        cut = tl.load(ranges + row * RANGE + LEAST_KEPT)
        group = part * GROUPS + tl.arange(0, GROUPS)
        # Rows without a threshold have no maxima; and a NaN must be found.
        of_group = tl.load(maximum + row * groups + group, mask=cut > float("-inf"), other=float("inf"))
        if tl.max(tl.where(of_group < cut, 0, 1), axis=0) == 0:
            tl.store(part_score + row * PARTS + part, float("-inf"))
            tl.store(part_token + row * PARTS + part, _NO_TOKEN)
            return
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = row_logits(logits, row, token, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED)
    heat = sampling_param(param_rows, row, PARAM.temperature)
    spoiled = tl.max((x != x).to(tl.int32), axis=0) > 0
    if heat < GREEDY_BELOW:
        score = tl.max(x, axis=0)
        chosen = tl.min(tl.where(x == score, token, _NO_TOKEN), axis=0)
    else:
        key, sample = random_key(param_rows, row)
        at = tl.load(position + row)
        if FILTERED:
            x = tl.where(x <= tl.load(ranges + row * RANGE + MOST_KEPT), x, float("-inf"))
        score, chosen = best_of(x, token, 1.0 / heat, cut, key, at, sample, FILTERED)
    score = tl.where(spoiled, float("nan"), score)
    tl.store(part_score + row * PARTS + part, score)
    tl.store(part_token + row * PARTS + part, chosen)


@triton.jit
def best_of(x, token, inverse, cut, key, position, sample, FILTERED: tl.constexpr):
    """Return the best score, x * inverse + Gumbel noise, of a block's tokens, and its token; -inf and the token
    2147483647 if the block has none. FILTERED: only tokens that reach the cut count.

    Exact noise takes two exact logarithms. So rough scores first find the few tokens that can be the best, and only
    these are scored exactly, one by one. Mostly this is one token; there are more if the noise hardly separates equal
    logits.
    """
    few = False
    if FILTERED:
        x = tl.where(x >= cut, x, float("-inf"))
        few = tl.sum((x > float("-inf")).to(tl.int32), axis=0) <= _IN_TURN
    if few:
        waiting = tl.where(x > float("-inf"), token, _NO_TOKEN)
    else:
        rough = x * inverse + _rough_noise(_word(key, token, position, sample))
        most = tl.max(rough, axis=0)
        # An infinite score has no neighbours, and an empty block has no score.
        least = tl.where(tl.abs(most) == float("inf"), float("inf"), most - (_SLACK + _SLACK_OF_SCORE * tl.abs(most)))
        waiting = tl.where(rough >= least, token, _NO_TOKEN)
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], _NO_TOKEN, tl.int32)
    first = tl.min(waiting, axis=0)
    while first != _NO_TOKEN:
        its_x = tl.max(tl.where(token == first, x, float("-inf")), axis=0)
        score = its_x * inverse + _noise(_word(key, first, position, sample))
        if score > best:
            best, chosen = score, first
        waiting = tl.where(waiting == first, _NO_TOKEN, waiting)
        first = tl.min(waiting, axis=0)
    return best, chosen


@triton.jit
def _word(key, token, position, sample):
    """Compute the random word of sampling/gumbel.py: philox4x32-10 of (token // 4, position, sample, 0), keyed by the
    seed. The tokens of one thread share the computation, because the compiler merges equal calls."""
    zero = token * 0
    a, b, c, d = tl.philox(
        key.to(tl.uint64), (token // 4).to(tl.uint32), (zero + position).to(tl.uint32), (zero + sample).to(tl.uint32),
        zero.to(tl.uint32),
    )  # fmt: skip  # the counter in one line
    lane = token % 4
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@triton.jit
def _noise(word):
    """Compute the Gumbel noise -log(-log(u)) of sampling/gumbel.py, with u from the upper 24 bits of a random word, in
    float32. Near 1 a series replaces the inner logarithm."""
    # Both ends keep a distance of half a step. Near 1, the distance to 1 is what counts, and float32 has it exactly.
    top = (word >> 8).to(tl.int32)
    from_above = (16777215 - top).to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    uniform = top.to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    # -log(1 - y) = y + y^2/2 + y^3/3 + ...: to y = 1/16 seven terms are exact to float32; 1 - y would be rounded.
    y = from_above
    series = y * (1.0 + y * (0.5 + y * (0.33333334 + y * (0.25 + y * (0.2 + y * (0.16666667 + y * 0.14285715))))))
    return -tl.log(tl.where(y < 0.0625, series, -tl.log(uniform)))


@triton.jit
def _rough_noise(word):
    """Compute the Gumbel noise -log(-log(u)) of a random word with an error of 1e-4, from fast logarithms and three
    terms. At 1/16 the fourth term is 3.8e-6, or 6e-5 of the sum."""
    top = (word >> 8).to(tl.int32).to(tl.float32)
    y = (16777215.0 - top) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    uniform = top * 5.9604644775390625e-8 + 2.98023223876953125e-8
    return -fast_log(tl.where(y < 0.0625, y * (1.0 + y * (0.5 + y * 0.33333334)), -fast_log(uniform)))


@triton.jit
def winner(part_score, part_token, row, PARTS: tl.constexpr, LANES: tl.constexpr):
    """Return the largest score of all parts of a row, and its token, the lowest id among equals. The score is -inf if
    no token is left, and +inf if a logit was NaN."""
    lane = tl.arange(0, LANES)
    scores = tl.load(part_score + row * PARTS + lane, mask=lane < PARTS, other=float("-inf"))
    tokens = tl.load(part_token + row * PARTS + lane, mask=lane < PARTS, other=_NO_TOKEN)
    spoiled = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=0)
    chosen = tl.min(tl.where(scores == best, tokens, _NO_TOKEN), axis=0)
    return tl.where(spoiled, float("inf"), best), chosen


@triton.jit
def finish_kernel(
    part_score,
    part_token,
    wanted,
    last,
    slot,
    stop_id,
    last_token,
    out_token,
    out_finish,
    control,
    mask_kind,
    fed_token,
    last_row,
    row_position,
    known,
    held,
    stops,
    FINISH_STOP: tl.constexpr,
    FINISH_LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: the best token of all parts becomes the row's token, is fed back by slot (last_token [slots]) and
    checked for stops. out_finish [rows] is FINISH_STOP for a stop id, else FINISH_LENGTH if last, else 0.

    wanted [rows] 0: the row samples nothing (out_token -1). last [rows] not 0: the sequence ends by length, unless the
    token is a stop id or the row is held. slot [rows] is negative for a padding row. out_token is also -1 if a logit
    was NaN or the best score is infinite, but NOTHING_LEFT (see step.py) if a row's control [rows] left no token. For
    -1 and NOTHING_LEFT, a row that samples feeds back 0.

    MASKED: a row whose mask_kind [rows] is HELD has the effect of a row that did not run: out_token is step.HELD, and
    the token that it computed is fed back once more. fed_token and row_position [tokens] are of the step's tokens;
    last_row [rows] is the last token of a row. known [slots] takes the position of the token that is fed back, and held
    [slots] whether it was computed before. If the grammar left no token, out_token is NOTHING_LEFT.
    """
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    most, best = winner(part_score, part_token, row, PARTS, BLOCK)
    good = (most > float("-inf")) & (most < float("inf"))
    sampled = tl.load(wanted + row) != 0
    nothing = _DAMAGED
    if CONTROLLED:
        left = (most > float("-inf")) | (tl.load(control + row) == 0)
        nothing = tl.where(left | (not sampled), _DAMAGED, _NOTHING_LEFT)
    if MASKED:
        kind = tl.load(mask_kind + row)
        nothing = tl.where((kind == HAS_MASK) & (most == float("-inf")) & sampled, _NOTHING_LEFT, nothing)
    best = tl.where(good & sampled, best, nothing)
    finish = tl.where(tl.load(last + row) != 0, FINISH_LENGTH, 0)
    stopped = False
    for index in range(stops):
        stopped = stopped | (tl.load(stop_id + row * stops + index) == best)
    finish = tl.where(stopped & (best >= 0), FINISH_STOP, finish)
    next_token = tl.maximum(best, 0)
    at = tl.load(slot + row).to(tl.int64)
    real = (at >= 0) & sampled
    if MASKED:
        is_held = (kind == HELD) & sampled
        computed = tl.load(last_row + row)
        best = tl.where(is_held, _HELD_TOKEN, best)
        finish = tl.where(is_held, 0, finish)
        next_token = tl.where(is_held, tl.load(fed_token + computed), next_token)
        tl.store(known + at, tl.load(row_position + computed) + tl.where(is_held, 0, 1), mask=real)
        tl.store(held + at, is_held.to(tl.int32), mask=real)
    tl.store(out_token + row, best)
    tl.store(out_finish + row, finish)
    tl.store(last_token + at, next_token, mask=real)
