"""Attention of one query token per sequence over its pages. The keys of a sequence are divided among programs.

Split-KV as in Flash-Decoding (Dao et al., 2023): each program keeps a running maximum and sum over its split of the
keys. Then the splits are merged. With fewer than 24 sequences, most have several splits, and a second kernel merges
them. With more, the program that ends last merges its sequence's splits, because a second kernel would have no work for
most sequences. All query heads of a KV head are rows of one matrix product, so each key is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_worker.ops.triton.kernels.common import fetch_lines, let_next_start, load_heads, operand, wait, within_heads


@triton.jit(do_not_specialize=["splits_count"])
def decode_attention_kernel(
    query,
    pages,
    splits,
    arrived,
    position,
    page_table,
    out,
    part_out,
    part_lse,
    splits_count,
    sinks,
    slopes,
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
    LAST_MERGES: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the attention of one decoding token per sequence, for one KV head and one split of its keys, by an online
    softmax. A sequence with one split is written to `out`; others leave partial results to be merged. With LAST_MERGES,
    the last program of a sequence and KV head merges them.

    Grid [KV heads, splits_count]: the longest splits of all heads start first. Places without a split come last,
    because programs without work also take time. query [S, HEADS, DIM], position [S] of the token; splits as in
    kv_splits.

    TILE divides PAGE and the first key of each split. ROWS: query heads per KV head, up to a power of two, at least 16.
    Results before the merge: part_out [splits_count, HEADS, DIM] float32 (normalised), and part_lse [splits_count,
    HEADS], the log2 of the sum of weights, -inf for a split without keys that are seen, and without sinks. arrived [S,
    KV_HEADS] counts programs, and is zero before and after. MERGED: the number of splits that are merged at a time, of
    WIDTH heads, a power of two. SINKS: sinks [HEADS] float32 are scores without values, which the first split of a
    sequence counts. WINDOWED: a token sees the last `window` positions, its own included. CHUNKED: `window` is the size
    of a chunk, and a token sees its own chunk. ALIBI: slopes [HEADS] float32, times (key position - query position),
    are added to scores. LANES: DIM up to a power of two. Pages may have another type than the query; loaded values are
    converted to the query's type.
    """
    kv, split = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    key = tl.arange(0, TILE)
    real = row < GROUP
    # Data that was uploaded before the step is already there, whatever the kernel before this one still writes.
    owner = tl.load(splits + split)
    first = tl.load(splits + splits_count + split)
    end = tl.load(splits + 2 * splits_count + split)
    part = tl.load(splits + 3 * splits_count + split)
    begin = tl.load(splits + 4 * splits_count + split)
    parts = tl.load(splits + 5 * splits_count + split)
    width = tl.load(table_width)
    seq = tl.maximum(owner, 0).to(tl.int64)
    head = pages + kv.to(tl.int64) * head_stride + layer_offset
    table = page_table + seq * width
    if owner >= 0:
        # Page ids were uploaded too. The newest key may not be there yet, but this is only a prefetch.
        keys = head + tl.load(table + first // PAGE).to(tl.int64) * page_stride + first % PAGE * DIM
        fetch_lines(keys, TILE * DIM, PDL and not WINDOWED and not CHUNKED and LANES == DIM)
        fetch_lines(keys + value_offset, TILE * DIM, PDL and not WINDOWED and not CHUNKED and LANES == DIM)
    wait(PDL)
    if owner < 0:
        return
    let_next_start(PDL)  # what comes next begins as programs end
    at_query, low = 0, 0
    if WINDOWED or CHUNKED or ALIBI:
        at_query = tl.load(position + seq)
    if WINDOWED:
        low = tl.maximum(at_query + 1 - window, 0)
    if CHUNKED:
        low = at_query // window * window
    if WINDOWED or CHUNKED:
        first = tl.maximum(first, low // TILE * TILE)
    inside = within_heads(real, lane, DIM, LANES)
    q = tl.load(query + (seq * HEADS + kv * GROUP + row)[:, None] * DIM + lane[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    # The kernel uses exp2, so scores carry the factor log2(e).
    q = operand(q * (scale if CAPPED else scale * 1.4426950408889634), query.dtype.element_ty)
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        counted = real & (part == begin)
        sink = tl.load(sinks + kv * GROUP + row, mask=counted, other=-1e30) * 1.4426950408889634
        most = tl.maximum(most, sink)
        total = tl.where(counted, tl.exp2(sink - most), 0.0)
    if ALIBI:
        slope = tl.load(slopes + kv * GROUP + row, mask=real, other=0.0) * 1.4426950408889634
    acc = tl.zeros([ROWS, LANES], tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        page = tl.load(table + start // PAGE).to(tl.int64)
        at = start + key
        cell = head + page * page_stride + (start % PAGE + key)[:, None] * DIM + lane[None, :]
        seen = at < end
        if WINDOWED or CHUNKED:
            seen = seen & (at >= low)
        k = load_heads(cell, lane, DIM, LANES)
        # Values past the sequence may be NaN, and NaN times zero is NaN, so they are replaced.
        v = tl.where(
            seen[:, None], operand(load_heads(cell + value_offset, lane, DIM, LANES), query.dtype.element_ty), 0.0
        )
        score = tl.dot(q, tl.trans(operand(k, query.dtype.element_ty)))
        if CAPPED:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * 1.4426950408889634
        if ALIBI:
            score += slope[:, None] * (at - at_query).to(tl.float32)[None, :]
        score = tl.where(seen[None, :], score, -1e30)
        larger = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        weight = tl.where(seen[None, :], weight, 0.0)
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.dot(operand(weight, query.dtype.element_ty), v)
        most = larger
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (seq * HEADS + kv * GROUP + row)[:, None] * DIM + lane[None, :]
    if parts == 1:
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    else:
        place = part * HEADS + kv * GROUP + row
        tl.store(part_out + place[:, None] * DIM + lane[None, :], result, mask=inside)
        lse = tl.where(total > 0.0, most + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(part_lse + place, lse, mask=real)
        if LAST_MERGES:
            tl.debug_barrier()  # all of the program's writes, before it says that it has arrived
            if tl.atomic_add(arrived + seq * KV_HEADS + kv, 1, sem="acq_rel", scope="gpu") == parts - 1:
                result_at = out + seq * HEADS * DIM
                _merge(part_out, part_lse, result_at, begin, parts, kv * GROUP, HEADS, GROUP, DIM, LANES, WIDTH, MERGED)
                tl.store(arrived + seq * KV_HEADS + kv, 0)


@triton.jit(do_not_specialize=["splits_count"])
def merge_splits_kernel(
    splits,
    out,
    part_out,
    part_lse,
    splits_count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [S, KV heads]: merges the splits that decode_attention_kernel left. The result of a sequence with one split
    is already written."""
    seq, kv = tl.program_id(0), tl.program_id(1)
    begin = tl.load(splits + 6 * splits_count + seq)
    parts = tl.load(splits + 7 * splits_count + seq)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    wait(PDL)
    let_next_start(PDL)
    if parts > 1:
        result_at = out + seq.to(tl.int64) * HEADS * DIM
        _merge(part_out, part_lse, result_at, begin, parts, kv * GROUP, HEADS, GROUP, DIM, LANES, WIDTH, MERGED)


@triton.jit
def _merge(
    part_out,
    part_lse,
    out,
    begin,
    parts,
    head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge `parts` splits from `begin` on, for GROUP heads from `head` on, weighted by their log2 sums, and write the
    result to the sequence's row at `out`. Values that other programs wrote are read past the L1 cache, which does not
    see such writes."""
    lane = tl.arange(0, LANES)
    some = tl.arange(0, MERGED)
    row = tl.arange(0, WIDTH)
    most = tl.full([WIDTH], -1e30, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    acc = tl.zeros([WIDTH, LANES], tl.float32)
    for at in tl.range(0, parts, MERGED):
        here = (at + some < parts)[:, None] & (row < GROUP)[None, :]
        place = (begin + at + some)[:, None] * HEADS + head + row[None, :]
        lse = tl.load(part_lse + place, mask=here, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_out + place[:, :, None] * DIM + lane[None, None, :],
            mask=here[:, :, None] & (lane < DIM)[None, None, :] if LANES != DIM else here[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        larger = tl.maximum(most, tl.max(lse, axis=0))
        weight = tl.exp2(lse - larger[None, :])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        most = larger
    merged = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (head + row)[:, None] * DIM + lane[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=within_heads(row < GROUP, lane, DIM, LANES))
