"""Plans the attention of a step for the CPU kernels, once for all layers: items of rows, and parts for threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from quire_worker.arrays import Int32, Int64

_MAX_ITEM_ROWS: Final = 64
"""Most query rows per KV head of an item. The rows of an item share the transposed keys of a tile. With this many rows,
transposing takes little of the time."""
PLAN_ARRAYS: Final = ("position", "write_offset", "table", "items", "part_offsets")
"""The arrays of a plan whose addresses the kernels get, in this order."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The attention of a step, as `attention.attend` takes it."""

    rows: int
    real_rows: int
    position: Int64
    """[rows]; padding 0."""
    write_offset: Int64
    """[real rows]: index in the flat pool at which the row's key of layer 0 and KV head 0 is written."""
    table: Int64
    """[sequences * P]: the page table."""
    items: Int64
    """[items * 4]: of each item its first row, its tokens, the position of the first token, and the index of its first
    page in `table`."""
    part_offsets: Int64
    """[parts + 1]: the first item of each part, then the number of items. All parts cost about the same, as far
    as whole items allow; a part may be empty."""
    num_pairs: int
    """(query, key) pairs of one head in all items, without a window: of each item its tokens times the keys up to its
    last token, those that the causal mask hides included."""

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of the arrays, in the order of PLAN_ARRAYS."""
        return tuple(getattr(self, name).ctypes.data for name in PLAN_ARRAYS)


def max_item_tokens(group: int) -> int:
    """Return the largest number of tokens in an item, for `group` query heads per KV head."""
    return max(1, _MAX_ITEM_ROWS // group)


def plan_step(
    pages: Tensor, rows: int, position: Int32, count: Int32, page_table: Int32, group: int, max_parts: int
) -> CpuPlan:
    """Make the plan that `Ops.plan` describes: positions, write offsets, items of up to 64 query rows per KV head (of
    one token at least), and parts. `rows`: all rows of the step. Those after the last token are padding, with position
    0 and no write offset.

    Items are dealt to at most `max_parts` parts with about as many (query, key) pairs each, as if there were no window.
    `group`: query heads per KV head.
    """
    page_size, head_dim = pages.shape[4:]
    real_rows = int(count.sum())
    first_row = np.cumsum(count, dtype=np.int64) - count
    row_sequence = np.repeat(np.arange(count.size), count)
    row_position = np.zeros(rows, np.int64)
    real_position = row_position[:real_rows]
    real_position += position[row_sequence] + np.arange(real_rows) - first_row[row_sequence]
    page = page_table[row_sequence, real_position // page_size].astype(np.int64)
    write_offset = page * pages.stride(0) + real_position % page_size * head_dim

    max_tokens = max_item_tokens(group)
    items_per_sequence = -(-count // max_tokens)
    item_sequence = np.repeat(np.arange(count.size), items_per_sequence)
    token_offset = (
        np.arange(item_sequence.size) - (np.cumsum(items_per_sequence) - items_per_sequence)[item_sequence]
    ) * max_tokens
    tokens = np.minimum(max_tokens, count[item_sequence] - token_offset)
    first_position = position[item_sequence] + token_offset
    items = np.stack(
        (first_row[item_sequence] + token_offset, tokens, first_position, item_sequence * page_table.shape[1]), axis=1
    ).astype(np.int64)
    table = page_table.astype(np.int64).reshape(-1)
    cumulative_pairs = np.cumsum(tokens * (first_position + tokens))
    num_pairs = int(cumulative_pairs[-1]) if cumulative_pairs.size else 0
    parts = min(max_parts, cumulative_pairs.size)
    part_offsets = np.append(
        np.searchsorted(cumulative_pairs, num_pairs * np.arange(parts) // max(parts, 1)), cumulative_pairs.size
    )
    return CpuPlan(
        rows, real_rows, row_position, write_offset, table, items.reshape(-1), part_offsets.astype(np.int64), num_pairs
    )
