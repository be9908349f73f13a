"""Launchers of attention kernels. Decode attention splits the keys of a row among programs. Prefill attention cuts
chunks into tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire_worker.ops.triton.kernels.decode_attention import decode_attention_kernel, merge_splits_kernel
from quire_worker.ops.triton.kernels.prefill_attention import prefill_attention_kernel
from quire_worker.ops.triton.kv_splits import LAST_MERGES_FROM, NARROW, WIDE, tile_of, wide_until
from quire_worker.ops.triton.launch import options, power_of_two

if TYPE_CHECKING:
    from quire_worker.ops.interface import AttentionRules, HeadShape
    from quire_worker.ops.triton.attention_plan import TritonPlan

_DOT_ROWS = 16
_PREFILL_TILE = 64
# With up to this many prefill programs, the programs with the most keys start first, over all heads. With more, the
# programs of one head start together, since its keys fit into the L2 cache (measured on an H200).
_HEADS_TOGETHER = 2048
# The number of heads times splits that are merged at a time.
_MERGED = 16


def decode_attention(
    query: Tensor,
    pages: Tensor,
    layer: int,
    plan: TritonPlan,
    shape: HeadShape,
    rules: AttentionRules,
    out: Tensor,
    pdl: bool,
) -> None:
    """Compute attention for the first `plan.decodes` rows of query [R, Q D], and write it to the same rows of `out`. Do
    nothing if no sequence decodes. One kernel computes the plan's KV splits. The splits of a sequence are merged by its
    last program from 24 sequences on, else by a second kernel. Pages are as in Ops.plan, with any page size. `pdl`: see
    launch.py."""
    if plan.splits is None:
        return
    page = pages.shape[4]
    splits = plan.splits.shape[1]
    width = power_of_two(shape.heads // shape.kv_heads)
    # A split for wide tiles is also a whole number of narrow tiles, which suit smaller pages.
    tile = tile_of(plan.decodes, wide_until(shape)) if page >= WIDE else NARROW
    part_out = torch.empty((splits, shape.heads, shape.head_dim), dtype=torch.float32, device=out.device)
    part_lse = torch.empty((splits, shape.heads), dtype=torch.float32, device=out.device)
    merge = {"WIDTH": width, "MERGED": max(2, _MERGED // width)}
    last_merges = plan.decodes >= LAST_MERGES_FROM
    decode_attention_kernel[(shape.kv_heads, splits)](
        query,
        pages,
        plan.splits,
        plan.arrived,
        plan.position,
        plan.page_table,
        out,
        part_out,
        part_lse,
        splits,
        query if rules.sinks is None else rules.sinks,
        query if rules.slopes is None else rules.slopes,
        shape.score_scale,
        shape.softcap,
        rules.chunk or rules.window,
        *plan.addressing(pages, layer),
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        LANES=power_of_two(shape.head_dim),
        PAGE=page,
        TILE=min(tile, page),
        ROWS=max(_DOT_ROWS, width),
        **merge,
        LAST_MERGES=last_merges,
        CAPPED=shape.softcap > 0.0,
        WINDOWED=rules.window > 0,
        CHUNKED=rules.chunk > 0,
        ALIBI=rules.slopes is not None,
        SINKS=rules.sinks is not None,
        STAGES=5,
        **options(pdl, num_warps=4 if tile == WIDE else 2),
    )
    if not last_merges:
        merge_splits_kernel[(plan.decodes, shape.kv_heads)](
            plan.splits,
            out,
            part_out,
            part_lse,
            splits,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            LANES=power_of_two(shape.head_dim),
            **merge,
            **options(pdl, num_warps=2),
        )


def prefill_attention(
    query: Tensor,
    pages: Tensor,
    layer: int,
    plan: TritonPlan,
    shape: HeadShape,
    rules: AttentionRules,
    out: Tensor,
    pdl: bool,
) -> None:
    """Compute attention for the rows of the plan's tiles, of query [R, Q D], and write it to the same rows of `out`, by
    one kernel. Do nothing if the plan has no tiles. `pdl`: see launch.py."""
    if plan.tile_sequence is None:
        return
    group = shape.heads // shape.kv_heads
    tiles = plan.tile_sequence.shape[0]
    # Many tiles of a padded step belong to no sequence: its filling rows would make so many.
    filled = -(-(plan.rows - plan.decodes) // plan.tile_tokens)
    steps = (shape.kv_heads, 1) if filled * shape.kv_heads <= _HEADS_TOGETHER else (1, tiles)
    prefill_attention_kernel[(tiles * shape.kv_heads,)](
        query,
        pages,
        plan.tile_sequence,
        plan.tile_token,
        plan.first_row,
        plan.first_position,
        plan.count,
        plan.page_table,
        out,
        query if rules.sinks is None else rules.sinks,
        query if rules.slopes is None else rules.slopes,
        tiles,
        *steps,
        shape.score_scale,
        shape.softcap,
        rules.chunk or rules.window,
        *plan.addressing(pages, layer),
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        LANES=power_of_two(shape.head_dim),
        PAGE=pages.shape[4],
        TILE=_PREFILL_TILE,
        TOKENS=plan.tile_tokens,
        ROWS=max(_DOT_ROWS, power_of_two(plan.tile_tokens * group)),
        CAPPED=shape.softcap > 0.0,
        WINDOWED=rules.window > 0,
        CHUNKED=rules.chunk > 0,
        ALIBI=rules.slopes is not None,
        SINKS=rules.sinks is not None,
        EVEN=plan.even,
        STAGES=2,
        **options(pdl, num_warps=4),
    )
