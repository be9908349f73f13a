"""Normalizes query and key heads, rotates both, and writes keys and values to their pages, in one pass over qkv. A
second kernel only rotates, for modelling code of transformers."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import let_next_start, wait


@triton.jit(do_not_specialize=["rows"])
def qk_norm_rope_write_kernel(
    qkv,
    query_norm_weight,
    key_norm_weight,
    cos,
    sin,
    position,
    sequence,
    page_table,
    pages,
    query,
    rows,
    eps,
    table_width,
    page_stride,
    head_stride,
    layer_offset,
    value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TABLE: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and rotate query and key heads of qkv; write queries to `query` and keys and values to their pages. Grid
    [rows / TOGETHER, KV heads]: a program takes the query heads of one KV head of its rows, their key and their value.

    qkv [R, (HEADS + 2 KV_HEADS) DIM]; cos, sin [positions, DIM / 2]; position [R], negative for a padding row, which is
    not written to any page; sequence [R] is the row of page_table. TABLE: the number of elements of cos and sin from
    one position to the next, 0 if all positions have the same. PARTS: a power of two above heads per KV head + 1. NORM:
    1 before the rotation, 2 after it, 0 none. LANES: half of DIM up to a power of two.

    KEPT: rotated keys are also written back to qkv, for an attention without pages. Keys and values of padding rows are
    written there as 0, because such an attention multiplies the rows after a prompt by 0, and NaN times 0 is NaN. In
    pages of float8, keys and values are clamped to -448..448.
    """
    kv = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    part = tl.arange(0, PARTS)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    is_query, is_key, is_value = part < GROUP, part == GROUP, part == GROUP + 1
    head = tl.where(is_query, kv * GROUP + part, tl.where(is_key, HEADS + kv, HEADS + KV_HEADS + kv))
    there = row < rows
    real = there[:, None, None] & (part < GROUP + 2)[None, :, None]
    if LANES != HALF:
        real = real & inside[None, None, :]
    if NORM:
        q1 = tl.load(query_norm_weight + lane, mask=inside, other=0.0).to(tl.float32)
        q2 = tl.load(query_norm_weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)
        k1 = tl.load(key_norm_weight + lane, mask=inside, other=0.0).to(tl.float32)
        k2 = tl.load(key_norm_weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    let_next_start(PDL)
    at = tl.load(position + row, mask=there, other=-1)
    place = tl.maximum(at, 0)
    source = (row * ((HEADS + 2 * KV_HEADS) * DIM))[:, None] + (head * DIM)[None, :]
    source = qkv + source[:, :, None] + lane[None, None, :]
    first = tl.load(source, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    query_part, turned = is_query[None, :, None], (is_query | is_key)[None, :, None]
    if NORM:
        norm1 = tl.where(query_part, q1[None, None, :], k1[None, None, :])
        norm2 = tl.where(query_part, q2[None, None, :], k2[None, None, :])
    if NORM == 1:
        inverse = tl.rsqrt((tl.sum(first * first, axis=2) + tl.sum(second * second, axis=2)) / DIM + eps)[:, :, None]
        first = tl.where(turned, first * inverse * norm1, first)
        second = tl.where(turned, second * inverse * norm2, second)
    angle = (place.to(tl.int64) * TABLE)[:, None] + lane[None, :]
    c = tl.load(cos + angle, mask=inside[None, :], other=0.0).to(tl.float32)[:, None, :]
    s = tl.load(sin + angle, mask=inside[None, :], other=0.0).to(tl.float32)[:, None, :]
    low = tl.where(turned, first * c - second * s, first)
    high = tl.where(turned, second * c + first * s, second)
    if NORM == 2:
        inverse = tl.rsqrt((tl.sum(low * low, axis=2) + tl.sum(high * high, axis=2)) / DIM + eps)[:, :, None]
        low = tl.where(turned, low * inverse * norm1, low)
        high = tl.where(turned, high * inverse * norm2, high)
    wanted = query_part & real
    target = (row * (HEADS * DIM))[:, None] + (head * DIM)[None, :]
    target = query + target[:, :, None] + lane[None, None, :]
    tl.store(target, low.to(query.dtype.element_ty), mask=wanted)
    tl.store(target + HALF, high.to(query.dtype.element_ty), mask=wanted)
    written = (is_key | is_value)[None, :] & (at >= 0)[:, None]
    if KEPT:
        padding = (at < 0)[:, None]
        kept = (is_key[None, :] | (is_value[None, :] & padding))[:, :, None] & real
        tl.store(source, tl.where(padding[:, :, None], 0.0, low).to(qkv.dtype.element_ty), mask=kept)
        tl.store(source + HALF, tl.where(padding[:, :, None], 0.0, high).to(qkv.dtype.element_ty), mask=kept)
    of = tl.load(sequence + row, mask=there, other=0).to(tl.int64)
    page = tl.load(page_table + of * tl.load(table_width) + place // PAGE, mask=there, other=0).to(tl.int64)
    cell = page * page_stride + kv.to(tl.int64) * head_stride + layer_offset + (place % PAGE) * DIM
    cell = cell[:, None] + tl.where(is_value, value_offset, 0)[None, :]
    cell = pages + cell[:, :, None] + lane[None, None, :]
    if pages.dtype.element_ty == tl.float8e4nv:
        # The largest number of the type; larger values would become NaN.
        low = tl.minimum(tl.maximum(low, -448.0), 448.0)
        high = tl.minimum(tl.maximum(high, -448.0), 448.0)
    tl.store(cell, low.to(pages.dtype.element_ty), mask=written[:, :, None] & real)
    tl.store(cell + HALF, high.to(pages.dtype.element_ty), mask=written[:, :, None] & real)


@triton.jit
def rotate_heads_kernel(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_row,
    query_head,
    key_row,
    key_head,
    query_out_row,
    query_out_head,
    key_out_row,
    key_out_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [R, HEADS + KV heads]: a program rotates the first DIM values of one head of one row. query, key and both
    results [heads, R, DIM or more] by strides of a row and a head; cos, sin [R, DIM]. LANES: half of DIM up to a power
    of two."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    wait(PDL)
    let_next_start(PDL)
    angle = row * DIM + lane
    c1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS:
        at = row * query_row + head * query_head + lane
        first = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(query + at + HALF, mask=inside, other=0.0).to(tl.float32)
        at = row * query_out_row + head * query_out_head + lane
        tl.store(query_out + at, (first * c1 - second * s1).to(query_out.dtype.element_ty), mask=inside)
        tl.store(query_out + at + HALF, (second * c2 + first * s2).to(query_out.dtype.element_ty), mask=inside)
    else:
        at = row * key_row + (head - HEADS) * key_head + lane
        first = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(key + at + HALF, mask=inside, other=0.0).to(tl.float32)
        at = row * key_out_row + (head - HEADS) * key_out_head + lane
        tl.store(key_out + at, (first * c1 - second * s1).to(key_out.dtype.element_ty), mask=inside)
        tl.store(key_out + at + HALF, (second * c2 + first * s2).to(key_out.dtype.element_ty), mask=inside)
