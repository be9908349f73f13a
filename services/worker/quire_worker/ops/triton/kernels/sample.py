"""From logits to tokens: Gumbel noise and argmax in one pass, then what the token means for its sequence.

The token is the largest x / temperature + noise among the logits that the thresholds keep (threshold.py), the lowest id
among equals: the definition of sampling/sampler.py, with float32 in place of float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait
from quire_worker.ops.triton.kernels.threshold import GREEDY_BELOW, load_logits


@triton.jit
def draw_kernel(
    logits,
    temperature,
    threshold,
    seed,
    sample_index,
    position,
    blocked,
    stop_id,
    part_score,
    part_token,
    control,
    changed,
    vocab,
    stops,
    per_part,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows, PARTS]: the best token of a part of the vocabulary, and its score; NaN where a logit is NaN.

    seed [rows] int64; position [rows] absolute index of the token that is drawn. per_part: a multiple of BLOCK. control
    and changed as in threshold_kernel."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    blocks = tl.load(blocked + row) != 0
    if CONTROLLED:
        if tl.load(control + row) != 0:
            score, token = _best(
                changed, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops,
                per_part, BLOCK, False,
            )  # fmt: skip  # one call, two ways
        else:
            score, token = _best_raw(
                logits, blocks, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops,
                per_part, BLOCK,
            )  # fmt: skip  # one call, two ways
    else:
        score, token = _best_raw(
            logits, blocks, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops,
            per_part, BLOCK,
        )  # fmt: skip  # one call, two ways
    tl.store(part_score + row * PARTS + part, score)
    tl.store(part_token + row * PARTS + part, token)


@triton.jit
def _best_raw(
    logits, blocks, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops, per_part,
    BLOCK: tl.constexpr,
):  # fmt: skip  # passed on as they are
    """Stop ids are looked at only where they are blocked."""
    if blocks:
        score, token = _best(
            logits, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops, per_part,
            BLOCK, True,
        )  # fmt: skip  # one call, two ways
    else:
        score, token = _best(
            logits, temperature, threshold, seed, sample_index, position, stop_id, row, part, vocab, stops, per_part,
            BLOCK, False,
        )  # fmt: skip  # one call, two ways
    return score, token


@triton.jit
def _best(
    logits,
    temperature,
    threshold,
    seed,
    sample_index,
    position,
    stop_id,
    row,
    part,
    vocab,
    stops,
    per_part,
    BLOCK: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    cut = tl.load(threshold + row)
    key = tl.load(seed + row)
    sample = tl.load(sample_index + row)
    at = tl.load(position + row)
    greedy = heat < GREEDY_BELOW
    inverse = 1.0 / tl.where(greedy, 1.0, heat)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK], 2147483647, tl.int32)
    spoiled = tl.zeros([BLOCK], tl.int32)
    first = part * per_part
    for start in range(first, tl.minimum(first + per_part, vocab), BLOCK):
        token = start + lane
        x = load_logits(logits, row * vocab, token, vocab, stop_id + row * stops, stops, BLOCKED)
        spoiled = spoiled | (x != x).to(tl.int32)
        score = x
        if not greedy:
            score = tl.where(x >= cut, x * inverse + _gumbel(key, token, at, sample), float("-inf"))
        better = (score > best) & (token < vocab)
        best = tl.where(better, score, best)
        chosen = tl.where(better, token, chosen)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, chosen, 2147483647), axis=0)
    most = tl.where(tl.max(spoiled, axis=0) > 0, float("nan"), most)
    return most, token


@triton.jit
def _gumbel(key, token, position, sample):
    """Noise of sampling/gumbel.py: philox4x32-10 of (token // 4, position, sample, 0) keyed by the seed."""
    zero = token * 0
    a, b, c, d = tl.philox(
        key.to(tl.uint64), (token // 4).to(tl.uint32), (zero + position).to(tl.uint32), (zero + sample).to(tl.uint32),
        zero.to(tl.uint32),
    )  # fmt: skip  # the counter in one line
    lane = token % 4
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    # Half a step off both ends; near 1 the distance to it is what counts, and float32 has it exactly from above.
    top = (word >> 8).to(tl.int32)
    from_above = (16777215 - top).to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    uniform = top.to(tl.float32) * 5.9604644775390625e-8 + 2.98023223876953125e-8
    # -log(1 - y) = y + y^2/2 + y^3/3 + ...: to y = 1/16 seven terms are exact to float32; 1 - y would be rounded.
    y = from_above
    series = y * (1.0 + y * (0.5 + y * (0.33333334 + y * (0.25 + y * (0.2 + y * (0.16666667 + y * 0.14285715))))))
    return -tl.log(tl.where(y < 0.0625, series, -tl.log(uniform)))


@triton.jit
def settle_kernel(
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
    stops,
    FINISH_STOP: tl.constexpr,
    FINISH_LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: the best of all parts becomes the row's token, is fed back by slot and checked for stops.

    wanted [rows] 0: nothing is drawn (out_token -1); last [rows] not 0: ends by length whatever is drawn; slot [rows],
    negative: a padding row. out_token -1 also where a logit was NaN, -2 where a row's control [rows] left nothing."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    let_next_start(PDL)
    score = tl.load(part_score + row * PARTS + lane, mask=lane < PARTS, other=float("-inf"))
    token = tl.load(part_token + row * PARTS + lane, mask=lane < PARTS, other=2147483647)
    spoiled = tl.max((score != score).to(tl.int32), axis=0) > 0
    most = tl.max(tl.where(score == score, score, float("-inf")), axis=0)
    best = tl.min(tl.where(score == most, token, 2147483647), axis=0)
    good = (not spoiled) & (most > float("-inf")) & (most < float("inf"))
    drawn = tl.load(wanted + row) != 0
    nothing = -1
    if CONTROLLED:
        left = spoiled | (most > float("-inf")) | (tl.load(control + row) == 0)
        nothing = tl.where(left | (not drawn), -1, -2)
    best = tl.where(good & drawn, best, nothing)
    finish = tl.where(tl.load(last + row) != 0, FINISH_LENGTH, 0)
    stopped = False
    for index in range(stops):
        stopped = stopped | (tl.load(stop_id + row * stops + index) == best)
    finish = tl.where(stopped & (best >= 0), FINISH_STOP, finish)
    tl.store(out_token + row, best)
    tl.store(out_finish + row, finish)
    at = tl.load(slot + row).to(tl.int64)
    tl.store(last_token + at, tl.maximum(best, 0), mask=(at >= 0) & drawn)
