"""One tile of attention: kernels for where its keys lie, its scores, their softmax, and the weighted values.

All work on scratch memory that attention.py lays out: transposed keys first, [D, TILE]. A tile holds 64 keys; what
is written here of two rows at once is the same arithmetic, in the same order, for each.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32, Int64
from quire_worker.ops.cpu.simd import (
    LANES,
    Number,
    Vector,
    add,
    divide,
    exp,
    fma,
    kernel,
    larger,
    largest,
    load,
    multiply,
    only,
    prefetch,
    spread,
    spread_from,
    store,
    subtract,
)

TILE: Final = 64
_HIDDEN: Final = np.float32(-np.inf)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_TWO: Final = np.float32(2.0)


@kernel
def find(
    table: Int64,
    pages: int,
    tile: int,
    end: int,
    page_stride: int,
    page_size: int,
    head_dim: int,
    base: int,
    places: Int64,
) -> None:
    """Where the keys of a tile lie; the last one's place is repeated up to a full vector."""
    keys = min(TILE, end - tile)
    at = 0
    while at < keys:
        position = tile + at
        slot = position % page_size
        place = table[pages + position // page_size] * page_stride + base + slot * head_dim
        run = min(page_size - slot, keys - at)
        for number in range(run):
            places[at + number] = place + number * head_dim
        at += run
    for at in range(keys, (keys + LANES - 1) // LANES * LANES):
        places[at] = places[keys - 1]


@kernel
def score(scratch: Float32, query: int, head_dim: int, weights: int, pool: Float32, coming: Int64, ahead: int) -> None:
    """Products of two rows with the transposed keys of a tile."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(_ZERO)
    parts = head_dim // LANES
    for outer in range(LANES):
        for part in range(parts):
            d = outer * parts + part
            a = spread_from(scratch, query + d)
            b = spread_from(scratch, query + head_dim + d)
            k0 = load(scratch, d * TILE)
            k1 = load(scratch, d * TILE + LANES)
            k2 = load(scratch, d * TILE + 2 * LANES)
            k3 = load(scratch, d * TILE + 3 * LANES)
            a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
            b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
            key = 4 * outer
            if key < ahead:
                prefetch(pool, coming[key] + part * LANES)
                prefetch(pool, coming[key + 1] + part * LANES)
                prefetch(pool, coming[key + 2] + part * LANES)
                prefetch(pool, coming[key + 3] + part * LANES)
    store(scratch, weights, a0)
    store(scratch, weights + LANES, a1)
    store(scratch, weights + 2 * LANES, a2)
    store(scratch, weights + 3 * LANES, a3)
    store(scratch, weights + TILE, b0)
    store(scratch, weights + TILE + LANES, b1)
    store(scratch, weights + TILE + 2 * LANES, b2)
    store(scratch, weights + TILE + 3 * LANES, b3)


@kernel
def soften(
    scratch: Float32,
    weights: int,
    peak_at: int,
    count_at: int,
    sums_at: int,
    head_dim: int,
    low: int,
    high: int,
    softcap: Number,
) -> None:
    """Scores low..high of a row become weights, the others 0; what the row has so far is scaled to the new peak."""
    s0 = only(capped(load(scratch, weights), softcap), 0, low, high, _HIDDEN)
    s1 = only(capped(load(scratch, weights + LANES), softcap), LANES, low, high, _HIDDEN)
    s2 = only(capped(load(scratch, weights + 2 * LANES), softcap), 2 * LANES, low, high, _HIDDEN)
    s3 = only(capped(load(scratch, weights + 3 * LANES), softcap), 3 * LANES, low, high, _HIDDEN)
    before = load(scratch, peak_at)
    peak = spread(largest(larger(larger(larger(s0, s1), larger(s2, s3)), before)))
    shrink = exp(subtract(before, peak))
    s0, s1, s2, s3 = exp(subtract(s0, peak)), exp(subtract(s1, peak)), exp(subtract(s2, peak)), exp(subtract(s3, peak))
    store(scratch, weights, s0)
    store(scratch, weights + LANES, s1)
    store(scratch, weights + 2 * LANES, s2)
    store(scratch, weights + 3 * LANES, s3)
    store(scratch, peak_at, peak)
    store(scratch, count_at, fma(load(scratch, count_at), shrink, add(add(s0, s1), add(s2, s3))))
    for d in range(0, head_dim, LANES):
        store(scratch, sums_at + d, multiply(load(scratch, sums_at + d), shrink))


@kernel
def capped(scores: Vector, softcap: Number) -> Vector:
    """softcap * tanh(scores / softcap); as they are where it is 0."""
    if softcap == _ZERO:
        return scores
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both ends too.
    doubled = exp(divide(scores, spread(softcap / _TWO)))
    return multiply(spread(softcap), subtract(spread(_ONE), divide(spread(_TWO), add(doubled, spread(_ONE)))))


@kernel
def collect_two(
    pool: Float32,
    places: Int64,
    values: int,
    scratch: Float32,
    weights: int,
    sums: int,
    head_dim: int,
    low: int,
    high: int,
    coming: Int64,
    ahead: int,
) -> None:
    """Add the weighted values low..high to the sums of two rows."""
    d = 0
    while d + 2 * LANES <= head_dim:
        a0, a1 = load(scratch, sums + d), load(scratch, sums + d + LANES)
        b0, b1 = load(scratch, sums + head_dim + d), load(scratch, sums + head_dim + d + LANES)
        for key in range(low, high):
            place = places[key] + values + d
            v0, v1 = load(pool, place), load(pool, place + LANES)
            if key < ahead:
                prefetch(pool, coming[key] + values + d)
                prefetch(pool, coming[key] + values + d + LANES)
            a, b = spread_from(scratch, weights + key), spread_from(scratch, weights + TILE + key)
            a0, a1, b0, b1 = fma(a, v0, a0), fma(a, v1, a1), fma(b, v0, b0), fma(b, v1, b1)
        store(scratch, sums + d, a0)
        store(scratch, sums + d + LANES, a1)
        store(scratch, sums + head_dim + d, b0)
        store(scratch, sums + head_dim + d + LANES, b1)
        d += 2 * LANES
    if d < head_dim:
        a0, b0 = load(scratch, sums + d), load(scratch, sums + head_dim + d)
        for key in range(low, high):
            v0 = load(pool, places[key] + values + d)
            a0 = fma(spread_from(scratch, weights + key), v0, a0)
            b0 = fma(spread_from(scratch, weights + TILE + key), v0, b0)
        store(scratch, sums + d, a0)
        store(scratch, sums + head_dim + d, b0)


@kernel
def collect(
    pool: Float32,
    places: Int64,
    values: int,
    scratch: Float32,
    weights: int,
    sums: int,
    head_dim: int,
    low: int,
    high: int,
) -> None:
    """The same of one row: in the same order, hence to the same bits."""
    if low >= high:
        return
    for d in range(0, head_dim, LANES):
        a0 = load(scratch, sums + d)
        for key in range(low, high):
            a0 = fma(spread_from(scratch, weights + key), load(pool, places[key] + values + d), a0)
        store(scratch, sums + d, a0)
