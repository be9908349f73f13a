"""Attention of a prompt's chunk over its pages, with tiles of query tokens and a running softmax over tiles of keys.

This is FlashAttention-2 (Dao, 2023) over a page table. The query heads of one KV head are rows of the same tile, so
keys are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, load_heads, operand, wait, within_heads


@triton.jit
def _keys(
    head,
    table,
    start,
    key,
    end,
    lane,
    page_stride,
    value_offset,
    LIKE: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the tile of keys and values at positions start..start + TILE, and return both, converted to the type LIKE.
    `head` is the address of the KV head in page 0; `key` are the offsets in the tile. With MASKED, values past `end`
    become zero: they may be NaN, and NaN times zero is NaN. Keys past `end` are arbitrary: the caller masks their
    scores."""
    k_at = start + key
    if PAGE % TILE == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        cell = head + page * page_stride + (k_at % PAGE)[:, None] * DIM + lane[None, :]
    else:
        page = tl.load(table + k_at // PAGE, mask=k_at < end, other=0).to(tl.int64)
        cell = head + (page * page_stride + (k_at % PAGE) * DIM)[:, None] + lane[None, :]
    k = operand(load_heads(cell, lane, DIM, LANES), LIKE)
    v = operand(load_heads(cell + value_offset, lane, DIM, LANES), LIKE)
    if MASKED:
        v = tl.where((k_at < end)[:, None], v, 0.0)
    return k, v


@triton.jit
def _scores(q, k, softcap, CAPPED: tl.constexpr):
    """Compute q @ k.T in units of log2. CAPPED: soft-cap the scores first, and scale them by log2(e); otherwise q has
    this factor already."""
    score = tl.dot(q, tl.trans(k))
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * 1.4426950408889634
    return score


@triton.jit(do_not_specialize=["tiles", "tile_step", "head_step"])
def prefill_attention_kernel(
    query,
    pages,
    tile_sequence,
    tile_token,
    first_row,
    first_position,
    count,
    page_table,
    out,
    sinks,
    slopes,
    tiles,
    tile_step,
    head_step,
    scale,
    softcap,
    window,
    table_width,
    page_stride,
    head_stride,
    layer_offset,
    value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute causal attention of tiles of query tokens over their sequence's pages, by an online softmax over tiles of
    keys, and write it to their rows of `out`.

    Grid [tiles * KV heads], with the strides tile_step and head_step, one of which is 1. Each tile has its sequence
    (negative: padding without work) and its first token in the chunk. Each sequence has its first row in the query, the
    position of this row, and the number of its rows. A tile holds TOKENS tokens times the query heads of one KV head,
    ROWS >= TOKENS * heads in all.

    A turn takes TILE keys; TILE divides PAGE or PAGE divides TILE. SINKS: sinks [HEADS] float32 are scores without
    values. WINDOWED, CHUNKED, ALIBI, LANES: as in decode_attention_kernel. EVEN: all tiles of keys are computed with a
    mask, so that a token's result does not depend on its tile.
    """
    tile = tl.program_id(0) // tile_step % tiles
    kv = tl.program_id(0) // head_step % KV_HEADS
    wait(PDL)
    let_next_start(PDL)
    seq = tl.load(tile_sequence + tile)
    if seq < 0:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token0 = tl.load(tile_token + tile)
    rows = tl.load(count + seq)
    base = tl.load(first_position + seq)
    origin = tl.load(first_row + seq).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    key = tl.arange(0, TILE)
    token = token0 + row // GROUP
    real = (row < TOKENS * GROUP) & (token < rows)
    at = base + token
    place = (origin + token) * HEADS + kv * GROUP + row % GROUP
    inside = within_heads(real, lane, DIM, LANES)
    q = tl.load(query + place[:, None] * DIM + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    q = operand(q * (scale if CAPPED else scale * 1.4426950408889634), query.dtype.element_ty)
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + kv * GROUP + row % GROUP) * 1.4426950408889634
        most = tl.maximum(most, sink)
        total = tl.exp2(sink - most)
    if ALIBI:
        slope = tl.load(slopes + kv * GROUP + row % GROUP) * 1.4426950408889634
    acc = tl.zeros([ROWS, LANES], tl.float32)
    head = pages + kv.to(tl.int64) * head_stride + layer_offset
    table = page_table + seq.to(tl.int64) * tl.load(table_width)
    end = base + tl.minimum(token0 + TOKENS, rows)
    begin = tl.zeros_like(end)
    if WINDOWED:
        begin = tl.maximum(base + token0 - window + 1, 0) // TILE * TILE
    if CHUNKED:
        begin = (base + token0) // window * window // TILE * TILE
    # Tiles that every query of this tile sees whole need no mask.
    whole = begin
    if not (WINDOWED or CHUNKED or ALIBI or EVEN):
        whole = tl.maximum(begin, tl.minimum(base + token0 + 1, end) // TILE * TILE)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        k, v = _keys(
            head,
            table,
            start,
            key,
            end,
            lane,
            page_stride,
            value_offset,
            query.dtype.element_ty,
            DIM,
            LANES,
            PAGE,
            TILE,
            False,
        )
        score = _scores(q, k, softcap, CAPPED)
        larger = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(operand(weight, query.dtype.element_ty), v, acc)
        most = larger
    for start in tl.range(whole, end, TILE, num_stages=STAGES):
        k_at = start + key
        k, v = _keys(
            head,
            table,
            start,
            key,
            end,
            lane,
            page_stride,
            value_offset,
            query.dtype.element_ty,
            DIM,
            LANES,
            PAGE,
            TILE,
            True,
        )
        seen = k_at[None, :] <= at[:, None]
        if WINDOWED:
            seen = seen & (k_at[None, :] > (at - window)[:, None])
        if CHUNKED:
            seen = seen & (k_at[None, :] >= (at // window * window)[:, None])
        score = _scores(q, k, softcap, CAPPED)
        if ALIBI:
            score += slope[:, None] * (k_at[None, :] - at[:, None]).to(tl.float32)
        score = tl.where(seen, score, -1e30)
        larger = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.where(seen, tl.exp2(score - larger[:, None]), 0.0)
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(operand(weight, query.dtype.element_ty), v, acc)
        most = larger
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + place[:, None] * DIM + lane[None, :], result.to(out.dtype.element_ty), mask=inside)
