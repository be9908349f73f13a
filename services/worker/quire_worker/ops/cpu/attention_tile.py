"""Attention over one tile of 64 keys: kernels that locate keys, compute scores, update the softmax and add values.

attention.py lays out the scratch memory, which begins with the transposed keys [D, TILE]. A range low..high of keys
excludes high. A kernel for two rows does the same arithmetic, in the same order, as a kernel for one row.
`next_key_offsets` are the keys of the tile that comes next, and `prefetch_keys` is how many of them to prefetch.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32, Int64
from quire_worker.ops.cpu.simd import (
    LANES,
    Scalar,
    Vector,
    add,
    broadcast,
    divide,
    exp,
    fma,
    kernel,
    load,
    load_broadcast,
    maximum,
    multiply,
    prefetch,
    reduce_max,
    select_range,
    store,
    subtract,
)

TILE: Final = 64
_MASKED_SCORE: Final = np.float32(-np.inf)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_TWO: Final = np.float32(2.0)


@kernel
def locate_keys(
    table: Int64,
    pages: int,
    tile: int,
    end: int,
    page_stride: int,
    page_size: int,
    head_dim: int,
    base_offset: int,
    key_offsets: Int64,
) -> None:
    """Write the pool offset of each key from position `tile` to the tile's end or `end` to key_offsets. `pages` is the
    index of the sequence's first page in `table`.

    The last offset is repeated, so that their number fills a vector.
    """
    num_keys = min(TILE, end - tile)
    first_key = 0
    while first_key < num_keys:
        position = tile + first_key
        slot = position % page_size
        key_offset = table[pages + position // page_size] * page_stride + base_offset + slot * head_dim
        run = min(page_size - slot, num_keys - first_key)
        for key in range(run):
            key_offsets[first_key + key] = key_offset + key * head_dim
        first_key += run
    for first_key in range(num_keys, (num_keys + LANES - 1) // LANES * LANES):
        key_offsets[first_key] = key_offsets[num_keys - 1]


@kernel
def compute_scores(
    scratch: Float32,
    query_at: int,
    head_dim: int,
    weights_at: int,
    pool: Float32,
    next_key_offsets: Int64,
    prefetch_keys: int,
) -> None:
    """Compute the dot products of two query rows with the 64 transposed keys of a tile, and store them at `weights_at`
    [2, TILE]. Meanwhile prefetch the first `prefetch_keys` keys of the next tile."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
    chunks = head_dim // LANES
    for outer in range(LANES):
        for chunk in range(chunks):
            d = outer * chunks + chunk
            a = load_broadcast(scratch, query_at + d)
            b = load_broadcast(scratch, query_at + head_dim + d)
            k0 = load(scratch, d * TILE)
            k1 = load(scratch, d * TILE + LANES)
            k2 = load(scratch, d * TILE + 2 * LANES)
            k3 = load(scratch, d * TILE + 3 * LANES)
            a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
            b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
            key = 4 * outer
            if key < prefetch_keys:
                prefetch(pool, next_key_offsets[key] + chunk * LANES)
                prefetch(pool, next_key_offsets[key + 1] + chunk * LANES)
                prefetch(pool, next_key_offsets[key + 2] + chunk * LANES)
                prefetch(pool, next_key_offsets[key + 3] + chunk * LANES)
    store(scratch, weights_at, a0)
    store(scratch, weights_at + LANES, a1)
    store(scratch, weights_at + 2 * LANES, a2)
    store(scratch, weights_at + 3 * LANES, a3)
    store(scratch, weights_at + TILE, b0)
    store(scratch, weights_at + TILE + LANES, b1)
    store(scratch, weights_at + TILE + 2 * LANES, b2)
    store(scratch, weights_at + TILE + 3 * LANES, b3)


@kernel
def update_softmax(
    scratch: Float32,
    weights_at: int,
    row_max_at: int,
    row_sum_at: int,
    accumulators_at: int,
    head_dim: int,
    low: int,
    high: int,
    softcap: Scalar,
) -> None:
    """Soft-cap the scores of a row, then replace them by weights exp(score - maximum). Weights outside low..high are 0.

    The maximum covers this tile and earlier ones. The row's accumulators and its sum of weights are rescaled to it, and
    the new weights are added to the sum.
    """
    s0 = select_range(apply_softcap(load(scratch, weights_at), softcap), 0, low, high, _MASKED_SCORE)
    s1 = select_range(apply_softcap(load(scratch, weights_at + LANES), softcap), LANES, low, high, _MASKED_SCORE)
    s2 = select_range(
        apply_softcap(load(scratch, weights_at + 2 * LANES), softcap), 2 * LANES, low, high, _MASKED_SCORE
    )
    s3 = select_range(
        apply_softcap(load(scratch, weights_at + 3 * LANES), softcap), 3 * LANES, low, high, _MASKED_SCORE
    )
    old_max = load(scratch, row_max_at)
    new_max = broadcast(reduce_max(maximum(maximum(maximum(s0, s1), maximum(s2, s3)), old_max)))
    correction = exp(subtract(old_max, new_max))
    s0, s1, s2, s3 = (
        exp(subtract(s0, new_max)),
        exp(subtract(s1, new_max)),
        exp(subtract(s2, new_max)),
        exp(subtract(s3, new_max)),
    )
    store(scratch, weights_at, s0)
    store(scratch, weights_at + LANES, s1)
    store(scratch, weights_at + 2 * LANES, s2)
    store(scratch, weights_at + 3 * LANES, s3)
    store(scratch, row_max_at, new_max)
    store(scratch, row_sum_at, fma(load(scratch, row_sum_at), correction, add(add(s0, s1), add(s2, s3))))
    for d in range(0, head_dim, LANES):
        store(scratch, accumulators_at + d, multiply(load(scratch, accumulators_at + d), correction))


@kernel
def apply_softcap(scores: Vector, softcap: Scalar) -> Vector:
    """Return softcap * tanh(scores / softcap), or the scores themselves if softcap is 0."""
    if softcap == _ZERO:
        return scores
    # tanh(x) = 1 - 2 / (exp(2 x) + 1). This form also holds for very large and very small x.
    exp_2x = exp(divide(scores, broadcast(softcap / _TWO)))
    return multiply(
        broadcast(softcap), subtract(broadcast(_ONE), divide(broadcast(_TWO), add(exp_2x, broadcast(_ONE))))
    )


@kernel
def accumulate_values_two_rows(
    pool: Float32,
    key_offsets: Int64,
    value_offset: int,
    scratch: Float32,
    weights_at: int,
    accumulators_at: int,
    head_dim: int,
    low: int,
    high: int,
    next_key_offsets: Int64,
    prefetch_keys: int,
) -> None:
    """Add the values of keys low..high, times the weights [2, TILE] at `weights_at`, to the accumulators [2, head_dim]
    of two rows. Meanwhile prefetch values of the next tile: of the keys with the same indices low..high, below
    `prefetch_keys`."""
    d = 0
    while d + 2 * LANES <= head_dim:
        a0, a1 = load(scratch, accumulators_at + d), load(scratch, accumulators_at + d + LANES)
        b0, b1 = load(scratch, accumulators_at + head_dim + d), load(scratch, accumulators_at + head_dim + d + LANES)
        for key in range(low, high):
            value_at = key_offsets[key] + value_offset + d
            v0, v1 = load(pool, value_at), load(pool, value_at + LANES)
            if key < prefetch_keys:
                prefetch(pool, next_key_offsets[key] + value_offset + d)
                prefetch(pool, next_key_offsets[key] + value_offset + d + LANES)
            a, b = load_broadcast(scratch, weights_at + key), load_broadcast(scratch, weights_at + TILE + key)
            a0, a1, b0, b1 = fma(a, v0, a0), fma(a, v1, a1), fma(b, v0, b0), fma(b, v1, b1)
        store(scratch, accumulators_at + d, a0)
        store(scratch, accumulators_at + d + LANES, a1)
        store(scratch, accumulators_at + head_dim + d, b0)
        store(scratch, accumulators_at + head_dim + d + LANES, b1)
        d += 2 * LANES
    if d < head_dim:
        a0, b0 = load(scratch, accumulators_at + d), load(scratch, accumulators_at + head_dim + d)
        for key in range(low, high):
            v0 = load(pool, key_offsets[key] + value_offset + d)
            a0 = fma(load_broadcast(scratch, weights_at + key), v0, a0)
            b0 = fma(load_broadcast(scratch, weights_at + TILE + key), v0, b0)
        store(scratch, accumulators_at + d, a0)
        store(scratch, accumulators_at + head_dim + d, b0)


@kernel
def accumulate_values(
    pool: Float32,
    key_offsets: Int64,
    value_offset: int,
    scratch: Float32,
    weights_at: int,
    accumulators_at: int,
    head_dim: int,
    low: int,
    high: int,
) -> None:
    """Add the weighted values of keys low..high to the accumulators of one row, in the order of
    `accumulate_values_two_rows`, so that they have the same bits. Do nothing if low >= high."""
    if low >= high:
        return
    for d in range(0, head_dim, LANES):
        a0 = load(scratch, accumulators_at + d)
        for key in range(low, high):
            a0 = fma(load_broadcast(scratch, weights_at + key), load(pool, key_offsets[key] + value_offset + d), a0)
        store(scratch, accumulators_at + d, a0)
