"""Searches: the largest key of a block that it and the larger ones make heavy enough."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heavy_key(key, weight, wanted, BITS: tl.constexpr, TURNS: tl.constexpr):
    """The largest bound that has keys of at least `wanted` weight at or above it; the k-th largest key, for weights of
    1. key: ordered int32; only the upper BITS * TURNS bits of the bound are sought, the others are 0.

    A turn finds BITS of them, by as many sums as these have values; the sums are one reduction."""
    step = tl.arange(0, 1 << BITS)
    low = tl.full([], -2147483648, tl.int32)
    width = tl.full([], 1, tl.int32) << (32 - BITS)
    for _ in range(TURNS):
        bound = low + step * width
        above = tl.sum(tl.where(key[None, :] >= bound[:, None], weight[None, :], 0.0), axis=1)
        # The first is what the turn before found.
        low += tl.sum(((above >= wanted) & (step > 0)).to(tl.int32), axis=0) * width
        width = width >> BITS
    return low
