"""Paged attention for the CPU: reads keys and values where they lie, with online softmax over tiles of 64 keys.

Tiles begin at fixed absolute positions. What a row computes, and in which order, follows from its own position, the
window and the page contents alone: its results have the same bits in decode and prefill, in any company, on any pages,
with any number of threads. Keys that a row may not see are never computed with, so what is stale cannot leak.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire_worker.arrays import Float32, Int64
from quire_worker.ops.cpu.attention_tile import TILE, collect, collect_two, find, score, soften
from quire_worker.ops.cpu.job import FLOAT_BYTES, INT_BYTES, Arguments, float_of, floats_at, ints_at
from quire_worker.ops.cpu.simd import LANES, Number, divide, kernel, load, multiply, spread, store, total, transpose

_FEW_ROWS: Final = 8
"""Up to so many rows wait for memory more than they compute: the next tile is loaded ahead."""
_LEAST: Final = np.float32(-1e30)
"""Far below any score: the largest score of a row that has seen nothing, finite so that differences are no NaN."""
_ZERO: Final = np.float32(0.0)


@kernel
def scratch_floats(rows: int, head_dim: int) -> int:
    """Size of the scratch memory for items of at most `rows` query rows per KV head."""
    # Transposed keys, weights of two rows; of each row (one more makes the number even): query, sums, state.
    return TILE * head_dim + 2 * TILE + (rows + 1) * (2 * head_dim + 2 * LANES)


def attend_parts(first_part: int, last_part: int, arguments: Arguments) -> None:
    """(query, pool, out, plan, scratch, places, where the layer's keys begin in a (page, KV head), page stride, KV head
    stride, page size, KV heads, query heads per KV head, D, most rows of an item, score scale, softcap, window):
    `attend` of successive parts of the plan.

    plan: addresses as in PLAN_ARRAYS. scratch: `scratch_floats` for each part; places: 2 * TILE for each part.
    """
    plan, head_dim, most_rows = ints_at(arguments[3]), arguments[12], arguments[13]
    table, items, cuts = ints_at(plan[2]), ints_at(plan[3]), ints_at(plan[4])
    scratch = floats_at(arguments[4] + first_part * scratch_floats(most_rows, head_dim) * FLOAT_BYTES)
    places = arguments[5] + first_part * 2 * TILE * INT_BYTES
    attend(
        cuts[first_part],
        cuts[last_part],
        floats_at(arguments[0]),
        floats_at(arguments[1]),
        table,
        items,
        arguments[6],
        (arguments[7], arguments[8], arguments[9], arguments[10], arguments[11], head_dim, most_rows),
        float_of(arguments[14]),
        float_of(arguments[15]),
        arguments[16],
        ints_at(places),
        ints_at(places + TILE * INT_BYTES),
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
    layer_at: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scale: Number,
    softcap: Number,
    window: int,
    now: Int64,
    coming: Int64,
    scratch: Float32,
    out: Float32,
) -> None:
    """Attention of items `first_item`..`last_item`, written to their rows of `out`.

    query and out are flat [rows, heads, D]; pool is flat. An item (4 numbers of `items`) is successive rows of one
    sequence: first row, tokens, position of the first, and where its pages begin in `table`. `layer_at`: where the
    layer's keys begin in a (page, KV head). `sizes`: page stride, KV head stride, page size, KV heads, query heads per
    KV head, D, rows that scratch is made for. now and coming [TILE] are scratch memory too.
    """
    page_stride, head_stride, page_size, kv_heads, group, head_dim, most_rows = sizes
    weights_at = TILE * head_dim
    query_at = weights_at + 2 * TILE
    sums_at = query_at + (most_rows + 1) * head_dim
    peak_at = sums_at + (most_rows + 1) * head_dim
    count_at = peak_at + (most_rows + 1) * LANES
    values = page_size * head_dim
    for item in range(first_item, last_item):
        row, tokens, position = items[4 * item], items[4 * item + 1], items[4 * item + 2]
        rows = tokens * group
        begin, end = first_tile(position, window), position + tokens
        for head in range(kv_heads):
            enter(query, row, rows, head, sizes, scale, scratch, query_at, sums_at, peak_at, count_at)
            for tile in range(begin, end, TILE):
                if tile == begin and head == 0 and item == first_item:
                    find(table, items[4 * item + 3], tile, end, page_stride, page_size, head_dim, layer_at, coming)
                now, coming = coming, now
                next_item, next_head, next_tile = item, head, tile + TILE
                if next_tile >= end:
                    next_item, next_head = item + (head + 1) // kv_heads, (head + 1) % kv_heads
                    next_tile = first_tile(items[4 * min(next_item, last_item - 1) + 2], window)
                ahead = 0
                if next_item < last_item:
                    next_end = items[4 * next_item + 2] + items[4 * next_item + 1]
                    base = next_head * head_stride + layer_at
                    find(
                        table,
                        items[4 * next_item + 3],
                        next_tile,
                        next_end,
                        page_stride,
                        page_size,
                        head_dim,
                        base,
                        coming,
                    )
                    if rows <= _FEW_ROWS:
                        ahead = min(TILE, next_end - next_tile)
                for first in range(0, min(TILE, end - tile), LANES):
                    for d in range(0, head_dim, LANES):
                        transpose(pool, now, first, d, scratch, d * TILE + first, TILE)
                for r in range(0, rows, 2):
                    # Keys of the tile that rows r (a) and r + 1 (b) see. b is of a's token or of the next one.
                    seen_a = position + r // group + 1 - tile
                    seen_b = position + min(r + 1, rows - 1) // group + 1 - tile
                    low_a, low_b = 0, 0
                    if window > 0:
                        low_a, low_b = max(0, seen_a - window), max(0, seen_b - window)
                    high_a, high_b = min(TILE, seen_a), min(TILE, seen_b)
                    if high_b <= 0 or low_a >= TILE:
                        continue
                    score(scratch, query_at + r * head_dim, head_dim, weights_at, pool, coming, ahead)
                    sums = sums_at + r * head_dim
                    for which in range(2):
                        low, high = (low_b, high_b) if which else (low_a, high_a)
                        if low < high:
                            state = (r + which) * LANES
                            soften(
                                scratch,
                                weights_at + which * TILE,
                                peak_at + state,
                                count_at + state,
                                sums + which * head_dim,
                                head_dim,
                                low,
                                high,
                                softcap,
                            )
                    # a alone, then both, then b alone.
                    both_low, both_high = max(low_a, low_b), min(high_a, high_b)
                    if both_low >= both_high:
                        both_low = both_high = high_a
                    collect(pool, now, values, scratch, weights_at, sums, head_dim, low_a, both_low)
                    collect_two(
                        pool, now, values, scratch, weights_at, sums, head_dim, both_low, both_high, coming, ahead
                    )
                    low_b = max(low_b, both_high)
                    collect(pool, now, values, scratch, weights_at + TILE, sums + head_dim, head_dim, low_b, high_b)
                    ahead = 0
            leave(row, rows, head, sizes, scratch, sums_at, count_at, out)


@kernel
def enter(
    query: Float32,
    row: int,
    rows: int,
    head: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scale: Number,
    scratch: Float32,
    query_at: int,
    sums_at: int,
    peak_at: int,
    count_at: int,
) -> None:
    """Scaled queries of an item to scratch memory, the last one twice where their number is odd; clear their state."""
    _, _, _, kv_heads, group, head_dim, _ = sizes
    for r in range(rows + rows % 2):
        real = min(r, rows - 1)
        source = (((row + real // group) * kv_heads + head) * group + real % group) * head_dim
        for d in range(0, head_dim, LANES):
            store(scratch, query_at + r * head_dim + d, multiply(load(query, source + d), spread(scale)))
            store(scratch, sums_at + r * head_dim + d, spread(_ZERO))
        store(scratch, peak_at + r * LANES, spread(_LEAST))
        store(scratch, count_at + r * LANES, spread(_ZERO))


@kernel
def leave(
    row: int,
    rows: int,
    head: int,
    sizes: tuple[int, int, int, int, int, int, int],
    scratch: Float32,
    sums_at: int,
    count_at: int,
    out: Float32,
) -> None:
    """Weighted sums over sums of weights, to the rows of out."""
    _, _, _, kv_heads, group, head_dim, _ = sizes
    for r in range(rows):
        target = (((row + r // group) * kv_heads + head) * group + r % group) * head_dim
        count = spread(total(load(scratch, count_at + r * LANES)))
        for d in range(0, head_dim, LANES):
            store(out, target + d, divide(load(scratch, sums_at + r * head_dim + d), count))


@kernel
def first_tile(position: int, window: int) -> int:
    """Where the first tile begins that a row at `position` sees."""
    if window > 0 and position + 1 > window:
        return (position + 1 - window) // TILE * TILE
    return 0
