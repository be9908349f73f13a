"""A step's attention for the CPU kernels, planned once for all layers: which rows make an item, and who computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from quire_worker.arrays import Int32, Int64

_ITEM_ROWS: Final = 64
"""Query rows per KV head that share a tile's transposed keys: enough that transposing does not count."""
PLAN_ARRAYS: Final = ("position", "write_at", "table", "items", "cuts")
"""Kernels find the addresses of a plan's arrays in a list of this order."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's attention as the CPU kernels take it; see `attention.attend`."""

    rows: int
    real_rows: int
    position: Int64
    """[rows]; padding 0."""
    write_at: Int64
    """[real rows]: where in the flat pool a row's key of layer 0 and KV head 0 goes."""
    table: Int64
    """[sequences * P] pages."""
    items: Int64
    """[items * 4]."""
    cuts: Int64
    """[parts + 1]: where the items of each part begin; parts are of about equal cost."""
    cost: int
    """Cost of all items: (query, key) pairs of one head, without a window."""

    def addresses(self) -> tuple[int, ...]:
        """The addresses of the arrays, in the order of PLAN_ARRAYS."""
        return tuple(getattr(self, name).ctypes.data for name in PLAN_ARRAYS)


def item_tokens(group: int) -> int:
    """Most tokens of an item."""
    return max(1, _ITEM_ROWS // group)


def plan_step(
    pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32, group: int, most_parts: int
) -> CpuPlan:
    """See `Ops.plan`; `group`: query heads per KV head."""
    page_size, head_dim = pages.shape[4:]
    real_rows = int(count.sum())
    starts = np.cumsum(count, dtype=np.int64) - count
    sequence = np.repeat(np.arange(count.size), count)
    row_position = np.zeros(rows, np.int64)
    real = row_position[:real_rows]
    real += position[sequence] + np.arange(real_rows) - starts[sequence]
    page = page_table[sequence, real // page_size].astype(np.int64)
    write_at = page * pages.stride(0) + real % page_size * head_dim

    most = item_tokens(group)
    pieces = -(-count // most)
    owner = np.repeat(np.arange(count.size), pieces)
    offset = (np.arange(owner.size) - (np.cumsum(pieces) - pieces)[owner]) * most
    tokens = np.minimum(most, count[owner] - offset)
    first = position[owner] + offset
    items = np.stack((starts[owner] + offset, tokens, first, owner * page_table.shape[1]), axis=1).astype(np.int64)
    table = page_table.astype(np.int64).reshape(-1)
    reached = np.cumsum(tokens * (first + tokens))
    cost = int(reached[-1]) if reached.size else 0
    parts = min(most_parts, reached.size)
    cuts = np.append(np.searchsorted(reached, cost * np.arange(parts) // max(parts, 1)), reached.size)
    return CpuPlan(rows, real_rows, row_position, write_at, table, items.reshape(-1), cuts.astype(np.int64), cost)
