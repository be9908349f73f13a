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
"""Query rows of a prefill tile: tokens times the query heads of one KV head."""

# Programs of decode attention that are resident on a multiprocessor at once, as measured on Hopper.
_PROGRAMS_EACH = 4
# Under the interpreter they run one after the other, a millisecond each: as few as still share keys out.
_INTERPRETED_PROGRAMS = 16


@dataclass(slots=True)
class TritonPlan:
    """All tensors are int32 unless stated otherwise. There are R rows, S sequences and T tiles."""

    rows: int
    decodes: int
    """Sequences, and rows, that decode."""
    position: Tensor
    """[R], -1 for padding."""
    sequence: Tensor
    """[R] row of page_table."""
    page_table: Tensor
    """[S * P], row after row."""
    table_width: Tensor
    """[1]: P, which a captured graph reads at each replay."""
    splits: Tensor | None
    """[kv_splits.COLUMNS, shares of keys of what decodes]; None where nothing decodes."""
    arrived: Tensor
    """[decodes or more, KV heads], zero between kernels."""
    tile_tokens: int
    tile_sequence: Tensor | None
    """[T], those with the most keys first, -1 for padding; None where nothing prefills."""
    tile_token: Tensor | None
    """[T] first token of the tile within its chunk."""
    first_row: Tensor | None
    """[S]."""
    first_position: Tensor | None
    """[S]."""
    count: Tensor | None
    """[S]."""
    even: bool = False
    """What decodes is tiled too, and a query's keys are gone through alike in any tile."""
    fresh: tuple[Fresh, ...] | None = None
    """Chunks that are in no tile: torch's attention does them. None: nothing is kept for it."""
    turned: Tensor | None = None
    """Of the layer at hand, where something may be fresh: qkv with its keys turned."""

    def keep_turned(self, qkv: Tensor) -> None:
        """For what is fresh of this layer."""
        self.turned = qkv if self.fresh is not None else None

    def addressing(self, pages: Tensor, layer: int) -> tuple[Tensor, int, int, int, int]:
        """What kernels find keys and values by: table_width, and the strides of a page and of a KV head, the offset of
        the layer and that of values, in elements of the pool."""
        stride = pages.stride()
        return self.table_width, stride[0], stride[1], layer * stride[2], stride[3]


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Return the number of decode attention programs that a device runs at once."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_EACH * int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_programs(shape: HeadShape, device: torch.device) -> int:
    """Shares of keys that keep a device busy, whose programs also differ by KV head."""
    return -(-resident_programs(device) // shape.kv_heads)


def most_keys_first(position: Int32) -> NDArray[np.intp]:
    """The order of tiles by their first positions, lest the longest begin when the others end."""
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
    """Plan a step eagerly from host columns; see Ops.plan. `even`: decode rows are cut into tiles like prefill rows."""
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
