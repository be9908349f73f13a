"""Paged attention for the CPU: kernels read keys and values in place, with online softmax over tiles of 64 keys.

Sources: online softmax (Milakov and Gimelshein, 2018) and FlashAttention (Dao et al., 2022).

Tiles begin at fixed positions of the sequence. So the position of a row, the window and the page contents determine
what the row computes, and in which order. The result of a row has the same bits in decode and prefill, in any batch,
on any pages, with any number of threads. Keys that a row must not see are masked, and their values are not read. So
stale data in a page cannot reach a result.

A range a..b of items, parts or keys excludes b. A name that ends in `_at` or `_offset` is an index into a flat array.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32, Int64
from quire_worker.ops.cpu.attention_tile import (
    TILE,
    accumulate_values,
    accumulate_values_two_rows,
    compute_scores,
    locate_keys,
    update_softmax,
)
from quire_worker.ops.cpu.job import FLOAT_BYTES, INT_BYTES, Arguments, float_from_bits, floats_at, ints_at
from quire_worker.ops.cpu.simd import (
    LANES,
    Scalar,
    add,
    broadcast,
    divide,
    exp,
    kernel,
    load,
    multiply,
    reduce_sum,
    select_range,
    store,
    subtract,
    transpose,
)

_MAX_PREFETCH_ROWS: Final = 8
"""Items of at most this many query rows wait for memory, so the kernel prefetches the next tile for them."""
_MIN_SCORE: Final = np.float32(-1e30)
"""The running maximum of a row before its first key. The value is finite, because -inf minus -inf is NaN."""
_ZERO: Final = np.float32(0.0)


@kernel
def scratch_floats(rows: int, head_dim: int) -> int:
    """Return the size of the scratch memory, in floats, for items of at most `rows` query rows per KV head."""
    # The transposed keys of a tile, then the attention weights of two rows. Then for each row: the query, the
    # accumulator, the running maximum and the sum of weights. Rows are computed in pairs, so there is one row more.
    return TILE * head_dim + 2 * TILE + (rows + 1) * (2 * head_dim + 2 * LANES)


def attend_parts(first_part: int, last_part: int, arguments: Arguments) -> None:
    """Job kernel: compute the attention of the plan's parts `first_part`..`last_part` by one call of `attend`, with
    scratch memory of the first of them.

    Arguments: query, pool, out, plan, scratch, key offsets, layer offset, page stride, KV head stride, page size, KV
    heads, query heads per KV head, D, most rows of an item, score scale, softcap, window, chunk, slopes, sinks. plan:
    the addresses of PLAN_ARRAYS. scratch: `scratch_floats` floats for each part. key offsets: 2 * TILE integers for
    each part. slopes and sinks: 0 where there are none.
    """
    plan, head_dim, max_rows = ints_at(arguments[3]), arguments[12], arguments[13]
    table, items, part_offsets = ints_at(plan[2]), ints_at(plan[3]), ints_at(plan[4])
    scratch = floats_at(arguments[4] + first_part * scratch_floats(max_rows, head_dim) * FLOAT_BYTES)
    key_offsets = arguments[5] + first_part * 2 * TILE * INT_BYTES
    attend(
        part_offsets[first_part],
        part_offsets[last_part],
        floats_at(arguments[0]),
        floats_at(arguments[1]),
        table,
        items,
        arguments[6],
        (arguments[7], arguments[8], arguments[9], arguments[10], arguments[11], head_dim, max_rows),
        float_from_bits(arguments[14]),
        float_from_bits(arguments[15]),
        (arguments[16], arguments[17], int(arguments[18] != 0), int(arguments[19] != 0)),
        floats_at(arguments[18]),
        floats_at(arguments[19]),
        ints_at(key_offsets),
        ints_at(key_offsets + TILE * INT_BYTES),
        scratch,
        floats_at(arguments[2]),
    )


@kernel
def attend(
    first_item: int,
    last_item: int,
    query: Float32,
    pool: Float32,
    table: Int64,
    items: Int64,
    layer_offset: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scale: Scalar,
    softcap: Scalar,
    rules: tuple[int, int, int, int],
    slopes: Float32,
    sinks: Float32,
    key_offsets: Int64,
    next_key_offsets: Int64,
    scratch: Float32,
    out: Float32,
) -> None:
    """Compute the attention of items `first_item`..`last_item` into their rows of `out`.

    For each item and KV head, the kernel goes through the visible tiles of 64 keys with an online softmax, two query
    rows at a time. With few rows it prefetches the next tile.

    query and out are flat [rows, heads, D]; pool is flat. An item is successive rows of one sequence. Four numbers of
    `items` describe it: its first row, its tokens, the position of the first token, and the index of its first page in
    `table`. layer_offset: index of the layer's first key within a (page, KV head). sizes: page stride, KV head stride,
    page size, KV heads, query heads per KV head, D, and the rows that scratch has room for. rules: window and chunk in
    positions (0: none; a chunk takes precedence), and whether there are slopes and sinks. softcap 0: none. key_offsets
    and next_key_offsets [TILE] are scratch memory too: the keys of this tile and of the next one in the pool.
    """
    page_stride, head_stride, page_size, kv_heads, group, head_dim, max_rows = sizes
    window, chunk, has_slopes, has_sinks = rules
    weights_at = TILE * head_dim
    query_at = weights_at + 2 * TILE
    accumulators_at = query_at + (max_rows + 1) * head_dim
    row_max_at = accumulators_at + (max_rows + 1) * head_dim
    row_sum_at = row_max_at + (max_rows + 1) * LANES
    value_offset = page_size * head_dim
    for item in range(first_item, last_item):
        row, tokens, position = items[4 * item], items[4 * item + 1], items[4 * item + 2]
        rows = tokens * group
        begin, end = first_tile(position, window, chunk), position + tokens
        for head in range(kv_heads):
            load_queries(
                query, row, rows, head, sizes, scale, scratch, query_at, accumulators_at, row_max_at, row_sum_at
            )
            for tile in range(begin, end, TILE):
                if tile == begin and head == 0 and item == first_item:
                    locate_keys(
                        table,
                        items[4 * item + 3],
                        tile,
                        end,
                        page_stride,
                        page_size,
                        head_dim,
                        layer_offset,
                        next_key_offsets,
                    )
                key_offsets, next_key_offsets = next_key_offsets, key_offsets
                next_item, next_head, next_tile = item, head, tile + TILE
                if next_tile >= end:
                    next_item, next_head = item + (head + 1) // kv_heads, (head + 1) % kv_heads
                    next_tile = first_tile(items[4 * min(next_item, last_item - 1) + 2], window, chunk)
                prefetch_keys = 0
                if next_item < last_item:
                    next_end = items[4 * next_item + 2] + items[4 * next_item + 1]
                    base_offset = next_head * head_stride + layer_offset
                    locate_keys(
                        table,
                        items[4 * next_item + 3],
                        next_tile,
                        next_end,
                        page_stride,
                        page_size,
                        head_dim,
                        base_offset,
                        next_key_offsets,
                    )
                    if rows <= _MAX_PREFETCH_ROWS:
                        prefetch_keys = min(TILE, next_end - next_tile)
                for first in range(0, min(TILE, end - tile), LANES):
                    for d in range(0, head_dim, LANES):
                        transpose(pool, key_offsets, first, d, scratch, d * TILE + first, TILE)
                for r in range(0, rows, 2):
                    # Row a is r, row b is r + 1. Row b belongs to the same token as row a, or to the next token. Row
                    # a sees keys low_a..high_a of the tile.
                    end_a = position + r // group + 1 - tile
                    end_b = position + min(r + 1, rows - 1) // group + 1 - tile
                    low_a, low_b = 0, 0
                    if window > 0:
                        low_a, low_b = max(0, end_a - window), max(0, end_b - window)
                    if chunk > 0:
                        low_a = max(0, (tile + end_a - 1) // chunk * chunk - tile)
                        low_b = max(0, (tile + end_b - 1) // chunk * chunk - tile)
                    high_a, high_b = min(TILE, end_a), min(TILE, end_b)
                    if high_b <= 0 or low_a >= TILE:
                        continue
                    compute_scores(
                        scratch, query_at + r * head_dim, head_dim, weights_at, pool, next_key_offsets, prefetch_keys
                    )
                    if has_slopes:
                        first_head, row_b = head * group, min(r + 1, rows - 1)
                        add_position_bias(scratch, weights_at, slopes[first_head + r % group], 1 - end_a)
                        add_position_bias(scratch, weights_at + TILE, slopes[first_head + row_b % group], 1 - end_b)
                    accumulators = accumulators_at + r * head_dim
                    for row_of_pair in range(2):
                        low, high = (low_b, high_b) if row_of_pair else (low_a, high_a)
                        if low < high:
                            state_offset = (r + row_of_pair) * LANES
                            update_softmax(
                                scratch,
                                weights_at + row_of_pair * TILE,
                                row_max_at + state_offset,
                                row_sum_at + state_offset,
                                accumulators + row_of_pair * head_dim,
                                head_dim,
                                low,
                                high,
                                softcap,
                            )
                    # Values that row a alone sees, then those that both see, then those that row b alone sees.
                    both_low, both_high = max(low_a, low_b), min(high_a, high_b)
                    if both_low >= both_high:
                        both_low = both_high = high_a
                    accumulate_values(
                        pool, key_offsets, value_offset, scratch, weights_at, accumulators, head_dim, low_a, both_low
                    )
                    accumulate_values_two_rows(
                        pool,
                        key_offsets,
                        value_offset,
                        scratch,
                        weights_at,
                        accumulators,
                        head_dim,
                        both_low,
                        both_high,
                        next_key_offsets,
                        prefetch_keys,
                    )
                    low_b = max(low_b, both_high)
                    accumulate_values(
                        pool,
                        key_offsets,
                        value_offset,
                        scratch,
                        weights_at + TILE,
                        accumulators + head_dim,
                        head_dim,
                        low_b,
                        high_b,
                    )
                    prefetch_keys = 0
            if has_sinks:
                add_sinks(rows, head, group, sinks, scratch, row_max_at, row_sum_at)
            store_outputs(row, rows, head, sizes, scratch, accumulators_at, row_sum_at, out)


@kernel
def load_queries(
    query: Float32,
    row: int,
    rows: int,
    head: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scale: Scalar,
    scratch: Float32,
    query_at: int,
    accumulators_at: int,
    row_max_at: int,
    row_sum_at: int,
) -> None:
    """Copy the queries of an item and KV head, times the score scale, to scratch memory. Set accumulators and sums of
    weights to 0, and maxima to -1e30.

    If the number of rows is odd, the last row is copied twice, because rows are computed in pairs.
    """
    _, _, _, kv_heads, group, head_dim, _ = sizes
    for r in range(rows + rows % 2):
        source_row = min(r, rows - 1)
        query_source = (((row + source_row // group) * kv_heads + head) * group + source_row % group) * head_dim
        for d in range(0, head_dim, LANES):
            store(scratch, query_at + r * head_dim + d, multiply(load(query, query_source + d), broadcast(scale)))
            store(scratch, accumulators_at + r * head_dim + d, broadcast(_ZERO))
        store(scratch, row_max_at + r * LANES, broadcast(_MIN_SCORE))
        store(scratch, row_sum_at + r * LANES, broadcast(_ZERO))


@kernel
def store_outputs(
    row: int,
    rows: int,
    head: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scratch: Float32,
    accumulators_at: int,
    row_sum_at: int,
    out: Float32,
) -> None:
    """Divide the accumulators of an item and KV head by the rows' sums of weights (summed over lanes). Store the
    results in the rows of out."""
    _, _, _, kv_heads, group, head_dim, _ = sizes
    for r in range(rows):
        out_at = (((row + r // group) * kv_heads + head) * group + r % group) * head_dim
        row_sum = broadcast(reduce_sum(load(scratch, row_sum_at + r * LANES)))
        for d in range(0, head_dim, LANES):
            store(out, out_at + d, divide(load(scratch, accumulators_at + r * head_dim + d), row_sum))


@kernel
def add_position_bias(scratch: Float32, weights_at: int, slope: Scalar, first: int) -> None:
    """Add slope * distance to the 64 scores of a row (ALiBi). `first` is the distance (key minus query) of the tile's
    first key; it grows by 1 per key."""
    for key in range(TILE):
        scratch[weights_at + key] += slope * np.float32(first + key)


@kernel
def add_sinks(
    rows: int, head: int, group: int, sinks: Float32, scratch: Float32, row_max_at: int, row_sum_at: int
) -> None:
    """Add exp(sink - maximum), the weight of the sink of each row's head, to one lane of the row's sum of weights.
    `group`: query heads per KV head; `head`: the KV head."""
    for r in range(rows):
        sink = broadcast(sinks[head * group + r % group])
        weight = exp(subtract(sink, load(scratch, row_max_at + r * LANES)))
        # One lane: store_outputs sums them.
        store(
            scratch,
            row_sum_at + r * LANES,
            add(load(scratch, row_sum_at + r * LANES), select_range(weight, 0, 0, 1, _ZERO)),
        )


@kernel
def first_tile(position: int, window: int, chunk: int) -> int:
    """Return the position at which the first tile begins that a row at `position` sees under a window or chunks (0:
    none; chunks take precedence). It is a multiple of 64."""
    if chunk > 0:
        return position // chunk * chunk // TILE * TILE
    if window > 0 and position + 1 > window:
        return (position + 1 - window) // TILE * TILE
    return 0
