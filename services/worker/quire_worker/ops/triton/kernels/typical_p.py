"""typical_p: the range of logits that locally typical sampling keeps (Meister et al. 2022).

The definition is that of sampling/sampler.py, with float32 in place of float64. With z = (x - most) / temperature, -log
p differs from the entropy by as much as z differs from the mean of z. The kernel finds the least distance to the mean
within which the tokens weigh enough, by quartering the integers of float32. The tokens within this distance are all
that lie in one range of logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.row import row_logits


@triton.jit
def typical_range(
    logits, row, blocked, stop_id, control, changed, allowed, heat, p, most, cut, vocab, stops, BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip  # passed on as they are
    """Return the least and the largest logit that typical_p (`p`) keeps, among logits that reach the cut. `heat`: the
    temperature. `most`: the row's largest logit. A turn of the search is a pass over the whole vocabulary."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = row_logits(
            logits, row, start + lane, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
        )
        z, weight = _weighed(x, heat, most, cut)
        mass += weight
        moment += tl.where(weight > 0.0, weight * z, 0.0)
    total = tl.sum(mass, axis=0)
    mean = tl.sum(moment, axis=0) / total
    wanted = p * total
    # Tokens within the distance `low` weigh too little.
    low = tl.full([], -1, tl.int32)
    width = tl.full([], 536870912, tl.int32)
    for _ in range(16):
        one, two, three = low + width, low + 2 * width, low + 3 * width
        mass1 = tl.zeros([BLOCK], tl.float32)
        mass2 = tl.zeros([BLOCK], tl.float32)
        mass3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = row_logits(
                logits, row, start + lane, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
            )
            z, weight = _weighed(x, heat, most, cut)
            key = _distance_key(z, mean)
            mass1 += tl.where(key <= one, weight, 0.0)
            mass2 += tl.where(key <= two, weight, 0.0)
            mass3 += tl.where(key <= three, weight, 0.0)
        if tl.sum(mass3, axis=0) < wanted:
            low = three
        elif tl.sum(mass2, axis=0) < wanted:
            low = two
        elif tl.sum(mass1, axis=0) < wanted:
            low = one
        width = tl.maximum(width // 4, 1)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = row_logits(
            logits, row, start + lane, blocked, stop_id, control, changed, allowed, vocab, stops, CONTROLLED, MASKED
        )
        z, weight = _weighed(x, heat, most, cut)
        kept = (weight > 0.0) & (_distance_key(z, mean) <= low + 1)
        least = tl.minimum(least, tl.where(kept, x, float("inf")))
        largest = tl.maximum(largest, tl.where(kept, x, float("-inf")))
    return tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _weighed(x, heat, most, cut):
    """Return z = (x - most) / temperature, 0 for the largest logit, and the weights exp(z), 0 below the cut."""
    z = (x - most) / heat
    return z, tl.where(x >= cut, tl.exp(z), 0.0)


@triton.jit
def _distance_key(z, mean):
    """Convert the distance to the mean into an integer with the same order."""
    return tl.abs(z - mean).to(tl.int32, bitcast=True)
