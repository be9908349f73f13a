"""top_p alone: whether a drawn token lies in the nucleus, and another draw where it does not.

No threshold is sought. The best of more tokens, where it is kept, is the best of those that are: so a row is drawn from
all that min_p leaves, and asked whether what is strictly larger than its token weighs less than top_p. If not, it is
drawn again from what is strictly larger, which the nucleus lies in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait
from quire_worker.ops.triton.kernels.row import alone, row_logits
from quire_worker.ops.triton.kernels.sample import best_of


@triton.jit
def nucleus_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    blocked,
    stop_id,
    largest,
    threshold,
    seed,
    sample_index,
    position,
    part_score,
    part_token,
    control,
    changed,
    vocab,
    stops,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]: the best of all parts in rows of top_p without top_k, replaced where it is not in the nucleus.

    largest [rows] and threshold [rows] as threshold_kernel leaves them, part_score and part_token [rows, PARTS] as
    draw_kernel does. LANES: a power of two, at least PARTS."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    let_next_start(PDL)
    if not alone(temperature, top_k, top_p, row, vocab):
        return
    lane = tl.arange(0, LANES)
    scores = tl.load(part_score + row * PARTS + lane, mask=lane < PARTS, other=float("-inf"))
    tokens = tl.load(part_token + row * PARTS + lane, mask=lane < PARTS, other=2147483647)
    spoiled = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    best = tl.max(scores, axis=0)
    if spoiled | (best == float("inf")) | (best == float("-inf")):
        return
    chosen = tl.min(tl.where(scores == best, tokens, 2147483647), axis=0)
    heat, cut, most = tl.load(temperature + row), tl.load(threshold + row), tl.load(largest + row)
    key, sample, at = tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row)
    place = tl.arange(0, BLOCK)
    bound = row_logits(logits, row, chosen, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
    outside = bound < most
    while outside:
        above = tl.zeros([BLOCK], tl.float32)
        every = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = row_logits(logits, row, start + place, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
            weight = tl.where(x >= cut, tl.exp((x - most) / heat), 0.0)
            every += weight
            above += tl.where(x > bound, weight, 0.0)
        outside = tl.sum(above, axis=0) >= tl.load(top_p + row) * tl.sum(every, axis=0)
        if outside:
            best = tl.full([], float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + place
                x = row_logits(logits, row, token, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
                x = tl.where(x > bound, x, float("-inf"))
                score, its_token = best_of(x, token, 1.0 / heat, cut, key, at, sample)
                if score > best:
                    best, chosen = score, its_token
            bound = row_logits(logits, row, chosen, blocked, stop_id, control, changed, vocab, stops, CONTROLLED)
            # The largest itself is always kept.
            outside = bound < most
    tl.debug_barrier()
    tl.store(part_score + row * PARTS + lane, tl.where(lane == 0, best, float("-inf")), mask=lane < PARTS)
    tl.store(part_token + row * PARTS + lane, chosen, mask=lane < PARTS)
