"""Paged attention of the torch reference: online softmax over key tiles at fixed absolute positions.

Every bitwise promise rests on four facts, each held by a test: a row of a matrix product does not depend on how many
rows there are, from 4 on; an item of a batched product does not depend on the other items; reductions over a
contiguous last axis are per row; an element of torch's exp does not depend on where it lies (exp2's and sigmoid's do),
and exp(0) is exactly 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_worker.ops.interface import HeadShape
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.torch_plan import LEAST, Group, TorchPlan, group_masks


def paged_attention(
    query: Tensor, pages: Tensor, layer: int, plan: TorchPlan, shape: HeadShape, window: int, scratch: Scratch
) -> Tensor:
    """See `Ops.paged_attention`."""
    out = scratch.take("attention.out", plan.rows, shape.heads * shape.head_dim)
    out[plan.real_rows :].zero_()
    part = plan.page_size * shape.head_dim
    # Key parts of this layer: the index of layer 0's, on a view that begins two parts per layer later.
    flat = pages.view(-1, part)[2 * layer :]
    for group in plan.groups:
        result = _attend(_gather_queries(query, group, shape, scratch), flat, group, plan.tile, shape, window, scratch)
        _scatter(result, out, group, shape)
    return out


def _gather_queries(query: Tensor, group: Group, shape: HeadShape, scratch: Scratch) -> Tensor:
    """[sequences * K, rows, D], scaled; rows of a KV head are (token, query head of its group), padding zero."""
    per_kv = shape.heads // shape.kv_heads
    sequences = group.source.numel() // group.tokens
    real = group.tokens * per_kv
    packed = scratch.take("attention.query", sequences, shape.kv_heads, group.rows, shape.head_dim)
    packed[:, :, real:].zero_()
    rows = query.index_select(0, group.source).view(sequences, group.tokens, shape.kv_heads, per_kv, shape.head_dim)
    target = packed[:, :, :real].view(sequences, shape.kv_heads, group.tokens, per_kv, shape.head_dim)
    torch.mul(rows.transpose(1, 2), shape.score_scale, out=target)
    return packed.view(sequences * shape.kv_heads, group.rows, shape.head_dim)


def _attend(
    query: Tensor, flat: Tensor, group: Group, tile_size: int, shape: HeadShape, window: int, scratch: Scratch
) -> Tensor:
    """[sequences * K, real rows, D]."""
    kv_heads, head_dim = shape.kv_heads, shape.head_dim
    per_kv = shape.heads // kv_heads
    real = group.tokens * per_kv
    masks = group_masks(group, window, tile_size, per_kv)
    largest = total = result = query  # bound by the first tile, which every sequence reaches
    for number, (tile, mask) in enumerate(zip(group.tiles, masks, strict=True)):
        items, first = tile.sequences * kv_heads, tile.first_row
        rows, live_rows = group.rows - first, real - first
        gathered = scratch.take("attention.kv", tile.index.numel(), flat.shape[1])
        torch.index_select(flat, 0, tile.index, out=gathered)
        key, value = gathered.view(items, 2, tile_size, head_dim).unbind(1)
        scores = scratch.take("attention.scores", items, rows, tile_size)
        torch.bmm(query[:items, first:], key.transpose(1, 2), out=scores)
        live = scores[:, :live_rows]
        if shape.softcap:
            live.div_(shape.softcap).tanh_().mul_(shape.softcap)
        if mask is not None:
            start, hidden = mask
            scores.view(tile.sequences, kv_heads, rows, tile_size)[start:, :, :live_rows].add_(hidden)
        # A row with nothing to see in this tile keeps what it has: weights exp(-inf - LEAST) = 0, shrink exp(0) = 1.
        peak = live.amax(dim=-1, keepdim=True).clamp_(min=LEAST)
        if number == 0:
            largest = peak
            live.sub_(peak).exp_()
            total = live.sum(dim=-1, keepdim=True)
            result = torch.bmm(scores, value)[:, :live_rows]
            continue
        before = largest[:items, first:]
        torch.maximum(before, peak, out=peak)
        shrink = (before - peak).exp_()
        before.copy_(peak)
        live.sub_(peak).exp_()
        total[:items, first:].mul_(shrink).add_(live.sum(dim=-1, keepdim=True))
        weighted = scratch.take("attention.weighted", items, rows, head_dim)
        torch.bmm(scores, value, out=weighted)
        result[:items, first:].mul_(shrink).add_(weighted[:, :live_rows])
    return result.div_(total)


def _scatter(result: Tensor, out: Tensor, group: Group, shape: HeadShape) -> None:
    """Write [sequences * K, tokens * query heads of a KV head, D] to the step's rows."""
    per_kv = shape.heads // shape.kv_heads
    sequences = group.source.numel() // group.tokens
    rows = result.view(sequences, shape.kv_heads, group.tokens, per_kv, shape.head_dim).transpose(1, 2)
    rows = rows.reshape(sequences * group.tokens, shape.heads * shape.head_dim)
    source = group.source
    if group.real is not None:
        rows, source = rows.index_select(0, group.real), source.index_select(0, group.real)
    out.index_copy_(0, source, rows)
