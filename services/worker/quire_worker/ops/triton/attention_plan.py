"""TritonPlan: a step's attention as device tensors, planned once for all layers.

Each of the rows [0, decodes) is the only token of its sequence. The rows after them are prefill chunks, cut into tiles.
All tensors keep their addresses and shapes when a captured graph is replayed; only their contents change.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_worker.arrays import Int32
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.fresh_attention import Fresh
from quire_worker.ops.triton.kv_splits import max_splits, split_keys, tile_of, wide_until

PREFILL_ROWS = 64
"""Query rows of a prefill tile: its tokens times the query heads of one KV head."""

# The number of decode attention programs that a multiprocessor runs at once, as measured on Hopper.
_PROGRAMS_EACH = 4
# The interpreter runs programs one after the other, in a millisecond each. So this is the smallest number that still
# splits keys.
_INTERPRETED_PROGRAMS = 16


@dataclass(slots=True)
class TritonPlan:
    """All tensors are int32 unless stated otherwise. There are R rows, S sequences and T tiles."""

    rows: int
    decodes: int
    """The number of sequences that decode, and of their rows."""
    position: Tensor
    """[R], -1 for padding."""
    sequence: Tensor
    """[R] row of page_table."""
    page_table: Tensor
    """[S * P], row after row."""
    table_width: Tensor
    """[1]: P, which a captured graph reads at each replay."""
    splits: Tensor | None
    """[kv_splits.COLUMNS, places for splits] the KV splits of decoding sequences; None if no sequence decodes."""
    arrived: Tensor
    """[decodes or more, KV heads], zero between kernels."""
    tile_tokens: int
    tile_sequence: Tensor | None
    """[T] the sequence of each tile, -1 for padding. Tiles with the most keys come first. None if no sequence
    prefills."""
    tile_token: Tensor | None
    """[T] first token of the tile within its chunk."""
    first_row: Tensor | None
    """[S]."""
    first_position: Tensor | None
    """[S]."""
    count: Tensor | None
    """[S]."""
    even: bool = False
    """Decode rows are tiled too, and a query goes through its keys in the same order in any tile."""
    fresh: tuple[Fresh, ...] | None = None
    """Chunks that are in no tile, because torch's attention computes them. None: none were looked for."""
    turned: Tensor | None = None
    """The qkv of the current layer with rotated keys, if `fresh` may have chunks."""

    def keep_turned(self, qkv: Tensor) -> None:
        """Keep this layer's qkv for the chunks in `fresh`."""
        self.turned = qkv if self.fresh is not None else None

    def addressing(self, pages: Tensor, layer: int) -> tuple[Tensor, int, int, int, int]:
        """Return the numbers with which kernels find keys and values: table_width, the strides of a page and of a KV
        head, the offset of the layer, and the offset of values. Strides and offsets count elements of the pool."""
        stride = pages.stride()
        return self.table_width, stride[0], stride[1], layer * stride[2], stride[3]


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Return the number of decode attention programs that a device runs at once: 4 per multiprocessor, or 16 under the
    interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_EACH * int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_programs(shape: HeadShape, device: torch.device) -> int:
    """Return the number of KV splits that keep a device busy, given that programs also differ by KV head."""
    return -(-resident_programs(device) // shape.kv_heads)


def most_keys_first(position: Int32) -> NDArray[np.intp]:
    """Return the order of tiles by their first positions, so that the tiles with the most keys start first."""
    return np.argsort(-position, kind="stable")


def plan_step(
    device: torch.device,
    rows: int,
    position: Int32,
    count: Int32,
    page_table: Int32,
    shape: HeadShape,
    *,
    even: bool = False,
) -> TritonPlan:
    """Plan a step's attention from host columns, and copy the plan to the device; see Ops.plan. Sequences before the
    first one with several tokens decode, and their keys are split. The others are cut into prefill tiles, of
    which those with the most keys come first.

    With `even`, decode rows are cut into tiles like prefill rows, and there are no splits.
    """
    group = shape.heads // shape.kv_heads
    decodes = int(np.flatnonzero(count > 1)[0]) if (count > 1).any() else len(count)
    decodes = 0 if even else decodes
    sequence = np.zeros(rows, np.int32)
    at = np.full(rows, -1, np.int32)
    real = int(count.sum())
    owner = np.repeat(np.arange(len(count), dtype=np.int32), count)
    first = np.cumsum(count) - count
    sequence[:real] = owner
    at[:real] = position[owner] + np.arange(real) - first[owner]
    tokens = max(1, PREFILL_ROWS // group)
    tiles = [(seq, start) for seq in range(decodes, len(count)) for start in range(0, int(count[seq]), tokens)]
    grid = np.array(tiles, np.int32).reshape(-1, 2)
    grid = grid[most_keys_first(position[grid[:, 0]] + grid[:, 1])]

    def send(column: Int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column, np.int32)).to(device)

    programs = decode_programs(shape, device)
    room, tile = max_splits(decodes, programs), tile_of(decodes, wide_until(shape))
    splits = split_keys(position[:decodes] + 1, programs, room, tile)
    return TritonPlan(
        rows=rows,
        decodes=decodes,
        position=send(at),
        sequence=send(sequence),
        page_table=send(page_table),
        table_width=send(np.array([page_table.shape[1]], np.int32)),
        splits=send(splits) if decodes else None,
        arrived=torch.zeros((decodes, shape.kv_heads), dtype=torch.int32, device=device),
        tile_tokens=tokens,
        tile_sequence=send(grid[:, 0]) if tiles else None,
        tile_token=send(grid[:, 1]) if tiles else None,
        first_row=send(first) if tiles else None,
        first_position=send(position) if tiles else None,
        count=send(count) if tiles else None,
        even=even,
    )
