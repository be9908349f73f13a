"""Logprobs of sampled tokens and of the likeliest tokens of their rows. The first kernel computes partial results for
each block of the vocabulary, and the second one merges the blocks of a row.

Logits are ordered as integers: by value, then the lower id first. -0.0 is below 0.0, and a NaN is beyond the infinity
of its sign. A *key* combines both in one int64: the value above 0x7FFFFFFF - id. So no two tokens have the same key.

The row is read once. Its best key is the best of its blocks' best keys. Then the block of this key is searched again
for its next one. For few such tokens, this is cheaper than a list of the best keys of every block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import from_ordered, let_next_start, ordered, wait

# The key of no token, below all other keys.
_NO_KEY: tl.constexpr = tl.constexpr(-9223372036854775808)


@triton.jit
def block_logprobs_kernel(
    logits,
    row,
    token,
    part_key,
    part_sum,
    part_above,
    vocab,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [entries, PARTS]: for each block its best key (int64), the sum of its exponentials relative to its best
    logit, or to 0 if that is infinite, and how many of its logits are above the chosen token's (int32). row [entries]
    is an index into logits [N, vocab] and token [N]."""
    entry, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    let_next_start(PDL)
    at = tl.load(row + entry).to(tl.int64)
    chosen = _chosen(logits, token, at, vocab)
    token_id = part * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab
    x = tl.load(logits + at * vocab + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    key = _best_key(ordered(x), token_id, inside)
    shift = _shift(from_ordered((key >> 32).to(tl.int32)))
    out = entry * PARTS + part
    tl.store(part_key + out, key)
    tl.store(part_sum + out, tl.sum(tl.exp(x - shift), axis=0))
    tl.store(part_above + out, tl.sum((x > chosen).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["most"])
def merge_logprobs_kernel(
    logits,
    row,
    token,
    part_key,
    part_sum,
    part_above,
    packed,
    most,
    vocab,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [entries]: packed [entries, 2 + 2 * most] int32 takes the logprob (the bits of a float32) and the rank of
    the chosen token, then the ids of the best `most` tokens, among which the chosen one may be, then their logprobs as
    bits too. LANES: a power of two, at least PARTS."""
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    wait(PDL)
    let_next_start(PDL)
    at = tl.load(row + entry).to(tl.int64)
    chosen = _chosen(logits, token, at, vocab)
    known = lane < PARTS
    above = tl.load(part_above + entry * PARTS + lane, mask=known, other=0)
    keys = tl.load(part_key + entry * PARTS + lane, mask=known, other=_NO_KEY)
    part_best = tl.where(known, from_ordered((keys >> 32).to(tl.int32)), float("-inf"))
    shift = _shift(tl.max(part_best, axis=0))
    # This rounds once; logarithms of the parts would round once each.
    sums = tl.load(part_sum + entry * PARTS + lane, mask=known, other=0.0)
    normaliser = shift + tl.log(tl.sum(sums * tl.exp(part_best - shift), axis=0))
    packed += entry * (2 + 2 * most)
    tl.store(packed, (chosen - normaliser).to(tl.int32, bitcast=True))
    tl.store(packed + 1, tl.sum(above, axis=0) + 1)
    for index in range(most):
        best = tl.max(keys, axis=0)
        found = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        value = (best >> 32).to(tl.int32)
        tl.store(packed + 2 + index, found)
        tl.store(packed + 2 + most + index, (from_ordered(value) - normaliser).to(tl.int32, bitcast=True))
        if index + 1 < most:
            part = found // BLOCK
            token_id = part * BLOCK + tl.arange(0, BLOCK)
            inside = token_id < vocab
            x = tl.load(logits + at * vocab + token_id, mask=inside, other=float("-inf")).to(tl.float32)
            order = ordered(x)
            left = inside & ((order < value) | ((order == value) & (token_id > found)))
            keys = tl.where(lane == part, _best_key(order, token_id, left), keys)


@triton.jit
def _chosen(logits, token, at, vocab):
    """Return the logit of a row's token; any logit if the row sampled none."""
    return tl.load(logits + at * vocab + tl.maximum(tl.load(token + at), 0)).to(tl.float32)


@triton.jit
def _shift(most):
    """Return the number that is subtracted before exponentials are taken: the best logit, or 0 if that is infinite,
    since the difference would be NaN."""
    return tl.where(tl.abs(most) == float("inf"), 0.0, most)


@triton.jit
def _best_key(order, token_id, among):
    """Return the largest key of some tokens; _NO_KEY if there are none."""
    value = tl.max(tl.where(among, order, -0x80000000), axis=0)
    lowest = tl.min(tl.where(among & (order == value), token_id, 0x7FFFFFFF), axis=0)
    return (value.to(tl.int64) << 32) | (0x7FFFFFFF - lowest).to(tl.int64)
