"""Paged attention of the torch reference: online softmax over key tiles at fixed absolute positions.

The bits of a row depend on its sequence alone because of four facts, which tests check. A row of a batched product does
not depend on the other items, nor on the number of rows, from the number on that `invariance` measures. Reductions over
a contiguous last axis treat each row by itself. An element of torch's exp does not depend on its place in the tensor
(exp2's and sigmoid's do). exp(0) is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_worker.ops.interface import AttentionRules, HeadShape
from quire_worker.ops.scratch import Scratch
from quire_worker.ops.torch_plan import LEAST, Block, Group, Mask, TorchPlan, group_masks


def paged_attention(
    query: Tensor, pages: Tensor, layer: int, plan: TorchPlan, shape: HeadShape, rules: AttentionRules, scratch: Scratch
) -> Tensor:
    """Implement `Ops.paged_attention` [R, Q * D], one group of sequences at a time: gather queries, attend to key
    tiles, and scatter the results. The result is scratch memory; its padding rows are zero."""
    out = scratch.buffer("attention.out", plan.rows, shape.heads * shape.head_dim)
    out[plan.real_rows :].zero_()
    part = plan.page_size * shape.head_dim
    # The key parts of this layer: the index of layer 0's key parts, on a view that begins two parts per layer later.
    flat = pages.view(-1, part)[2 * layer :]
    for group in plan.groups:
        result = _attend(_gather_queries(query, group, shape, scratch), flat, group, plan.tile, shape, rules, scratch)
        _scatter(result, out, group, shape)
    return out


def _gather_queries(query: Tensor, group: Group, shape: HeadShape, scratch: Scratch) -> Tensor:
    """Return a group's queries [sequences * K, rows, D], times the score scale, in scratch memory. The rows of a KV
    head are pairs of a token and a query head of its group. Rows after the group's tokens are zero; padding tokens
    repeat the query of a sequence's last token."""
    per_kv = shape.heads // shape.kv_heads
    sequences = group.source.numel() // group.tokens
    real = group.tokens * per_kv
    packed = scratch.buffer("attention.query", sequences, shape.kv_heads, group.rows, shape.head_dim)
    packed[:, :, real:].zero_()
    rows = query.index_select(0, group.source).view(sequences, group.tokens, shape.kv_heads, per_kv, shape.head_dim)
    target = packed[:, :, :real].view(sequences, shape.kv_heads, group.tokens, per_kv, shape.head_dim)
    torch.mul(rows.transpose(1, 2), shape.score_scale, out=target)
    return packed.view(sequences * shape.kv_heads, group.rows, shape.head_dim)


def _attend(
    query: Tensor, flat: Tensor, group: Group, tile_size: int, shape: HeadShape, rules: AttentionRules, scratch: Scratch
) -> Tensor:
    """Return a group's attention results [sequences * K, real rows, D].

    Blocks of key tiles are computed in the order of positions. An online softmax merges tile after tile into the
    running maximum, sum and result. A sink adds only to the sum of weights.
    """
    per_kv = shape.heads // shape.kv_heads
    real = group.tokens * per_kv
    masks = group_masks(group, rules.window, rules.chunk, tile_size, per_kv)
    largest = total = result = query  # bound by the first block, which every sequence reaches
    for number, (block, hidden) in enumerate(zip(group.blocks, masks, strict=True)):
        items = block.sequences * shape.kv_heads
        part = slice(0, items), slice(block.first_row, None)
        before = largest[part] if number else None
        bias = None if rules.slopes is None else _position_bias(rules.slopes, group, block, tile_size, shape)
        peak, sums, weighted = _block(query[part], flat, block, hidden, bias, before, tile_size, shape, real, scratch)
        if before is None:
            largest, total, result = peak[-1], sums[0], weighted[0].clone()
            shrink = (peak[:-1] - peak[1:]).exp_()
            sums, weighted = sums[1:], weighted[1:]
        else:
            shrink = torch.cat((before[None], peak[:-1])).sub_(peak).exp_()
            before.copy_(peak[-1])
        # Tiles are combined only here, in the order of positions, however many of them a block holds.
        part_total, part_result = total[part], result[part]
        for factor, more_total, more_result in zip(shrink.unbind(), sums.unbind(), weighted.unbind(), strict=True):
            part_total.mul_(factor).add_(more_total)
            part_result.mul_(factor).add_(more_result)
    if rules.sinks is not None:
        # The sink has no value, so it only adds to the sum of weights.
        sinks = rules.sinks.view(shape.kv_heads, per_kv).repeat(1, group.tokens)
        total = total + (sinks.repeat(result.shape[0] // shape.kv_heads, 1)[:, :, None] - largest).exp_()
    return result.div_(total)


def _position_bias(slopes: Tensor, group: Group, block: Block, tile_size: int, shape: HeadShape) -> Tensor:
    """Return [tiles, sequences, K, rows, tile size]: what ALiBi adds to the scores of a block, slope * (key position -
    query position). The rows are those of the group's tokens, padding tokens too, from the block's first row on; the
    rows after the tokens, which fill a row tile, are left out."""
    per_kv = shape.heads // shape.kv_heads
    key = torch.arange(block.begin, block.begin + block.tiles * tile_size).view(block.tiles, 1, 1, 1, tile_size)
    query = torch.from_numpy(group.position[: block.sequences]).repeat_interleave(per_kv, dim=1)[:, block.first_row :]
    rows = slopes.view(shape.kv_heads, per_kv).repeat(1, group.tokens)[:, block.first_row :]
    return rows[:, :, None] * (key - query[None, :, None, :, None])


def _block(
    query: Tensor,
    flat: Tensor,
    block: Block,
    masks: list[Mask],
    bias: Tensor | None,
    before: Tensor | None,
    tile_size: int,
    shape: HeadShape,
    real: int,
    scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to a block of key tiles. Return for each tile: the largest score so far (at least LEAST), the sum of
    weights exp(score - largest) and the sum of values times weights.

    `query` [items, rows, D] has the rows from the block's first row on, for sequences times KV heads as items. `real`
    is the group's number of rows without padding. `before` is the largest score of earlier blocks, or None. Scores are
    soft-capped if the shape has a softcap, then `bias` and `masks` are added. All results have the shape [tiles, items,
    `real` - first row, .]; the last is scratch memory.
    """
    items, rows, head_dim = query.shape
    live_rows = real - block.first_row
    gathered = scratch.buffer("attention.kv", block.index.numel(), flat.shape[1])
    torch.index_select(flat, 0, block.index, out=gathered)
    key, value = gathered.view(block.tiles * items, 2, tile_size, head_dim).unbind(1)
    if block.tiles > 1:
        query = query.expand(block.tiles, -1, -1, -1).reshape(block.tiles * items, rows, head_dim)
    scores = scratch.buffer("attention.scores", block.tiles * items, rows, tile_size)
    torch.bmm(query, key.transpose(1, 2), out=scores)
    live = scores[:, :live_rows]
    if shape.softcap:
        live.div_(shape.softcap).tanh_().mul_(shape.softcap)
    by_sequence = scores.view(block.tiles, block.sequences, shape.kv_heads, rows, tile_size)
    if bias is not None:
        by_sequence[:, :, :, :live_rows].add_(bias)
    for mask in masks:
        by_sequence[mask.tile, mask.first :, :, :live_rows].add_(mask.hidden)
    # A row that sees nothing in a tile keeps its state: weights exp(-inf - LEAST) = 0, shrink exp(0) = 1.
    peak = live.amax(dim=-1, keepdim=True).clamp_(min=LEAST).view(block.tiles, items, live_rows, 1)
    if before is not None:
        torch.maximum(before, peak[0], out=peak[0])
    if block.tiles > 1:
        peak = peak.cummax(dim=0).values
    live.sub_(peak.view(-1, live_rows, 1)).exp_()
    weighted = scratch.buffer("attention.weighted", block.tiles * items, rows, head_dim)
    torch.bmm(scores, value, out=weighted)
    sums = live.sum(dim=-1, keepdim=True).view(peak.shape)
    return peak, sums, weighted.view(block.tiles, items, rows, head_dim)[:, :, :live_rows]


def _scatter(result: Tensor, out: Tensor, group: Group, shape: HeadShape) -> None:
    """Write a group's results [sequences * K, tokens * query heads of a KV head, D] to the rows of `out` [R, Q * D]
    that they belong to. Padding tokens are left out."""
    per_kv = shape.heads // shape.kv_heads
    sequences = group.source.numel() // group.tokens
    rows = result.view(sequences, shape.kv_heads, group.tokens, per_kv, shape.head_dim).transpose(1, 2)
    rows = rows.reshape(sequences * group.tokens, shape.heads * shape.head_dim)
    source = group.source
    if group.real is not None:
        rows, source = rows.index_select(0, group.real), source.index_select(0, group.real)
    out.index_copy_(0, source, rows)
