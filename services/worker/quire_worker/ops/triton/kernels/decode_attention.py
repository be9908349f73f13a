"""Attention of one query token per sequence over its pages, split over the keys, and the merge of the splits.

Split-KV as in Flash-Decoding (Dao et al., 2023): each program keeps a running maximum and sum over its share of keys,
the merge weighs the shares. All query heads of a KV head are rows of one product, so each key is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, operand, wait


@triton.jit
def decode_attention_kernel(
    query,
    pages,
    position,
    page_table,
    out,
    part_out,
    part_lse,
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
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [sequences, KV heads, SPLITS]. query [S, HEADS, DIM], position [S] of the token (negative: padding, zeros).

    TILE divides PAGE. ROWS: query heads per KV head, padded to 16. With SPLITS 1 it writes `out`, else part_out
    [S, HEADS, SPLITS, DIM] float32 (normalised) and part_lse [S, HEADS, SPLITS], -inf where a split holds no key.
    """
    seq, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, DIM)
    key = tl.arange(0, TILE)
    real = row < GROUP
    wait(PDL)
    length = tl.load(position + seq) + 1
    begin = tl.zeros_like(length)
    if WINDOWED:
        begin = tl.maximum(length - window, 0) // TILE * TILE
    tiles = (length - begin + TILE - 1) // TILE
    share = (tiles + SPLITS - 1) // SPLITS
    first = begin + split * share * TILE
    end = tl.minimum(first + share * TILE, length)
    q = tl.load(
        query + (seq * HEADS + kv * GROUP + row)[:, None] * DIM + lane[None, :], mask=real[:, None], other=0.0
    ).to(tl.float32)
    # exp2 below: scores carry log2(e).
    q = operand(q * (scale if CAPPED else scale * 1.4426950408889634), query.dtype.element_ty)
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    head = pages + kv.to(tl.int64) * head_stride + layer_offset
    table = page_table + seq * tl.load(table_width)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        page = tl.load(table + start // PAGE).to(tl.int64)
        at = start + key
        cell = head + page * page_stride + (start % PAGE + key)[:, None] * DIM + lane[None, :]
        seen = at < end
        if WINDOWED:
            seen = seen & (at >= length - window)
        k = tl.load(cell)
        # What lies past the sequence may be NaN, which no product with zero takes away.
        v = tl.where(seen[:, None], tl.load(cell + value_offset), 0.0)
        score = tl.dot(q, tl.trans(operand(k, query.dtype.element_ty)))
        if CAPPED:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * 1.4426950408889634
        score = tl.where(seen[None, :], score, -1e30)
        larger = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        weight = tl.where(seen[None, :], weight, 0.0)
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.dot(
            operand(weight, query.dtype.element_ty), operand(v, query.dtype.element_ty)
        )
        most = larger
    let_next_start(PDL)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    head_of_row = seq * HEADS + kv * GROUP + row
    if SPLITS == 1:
        target = out + head_of_row[:, None] * DIM + lane[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None])
    else:
        place = head_of_row * SPLITS + split
        tl.store(part_out + place[:, None] * DIM + lane[None, :], result, mask=real[:, None])
        lse = tl.where(total > 0.0, most + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(part_lse + place, lse, mask=real)


@triton.jit
def merge_splits_kernel(
    part_out, part_lse, out, DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid [sequences * HEADS]: the splits of one head, weighed by their log2 sums. BLOCK: SPLITS to a power of two."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    lane = tl.arange(0, DIM)
    wait(PDL)
    let_next_start(PDL)
    lse = tl.load(part_lse + head * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    most = tl.max(lse, axis=0)
    weight = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(most > float("-inf"), most, 0.0)), 0.0)
    total = tl.sum(weight, axis=0)
    part = tl.load(
        part_out + (head * SPLITS + split)[:, None] * DIM + lane[None, :], mask=(split < SPLITS)[:, None], other=0.0
    )
    merged = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + head * DIM + lane, merged.to(out.dtype.element_ty))
