"""Plans the attention of a step for the torch reference, once for all layers: groups of sequences, blocks of key tiles,
and masks.

Keys are cut into tiles at fixed absolute positions. Sequences that compute equally many rows form a group, with the
longest sequence first. So the sequences that have keys in a tile are the first ones of the group. If a row must not
attend to a tile, the tile leaves the row's result unchanged in every bit. So a row's result depends neither on its
group nor on how its prompt was cut into chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire_worker.arrays import Int32, Int64
from quire_worker.ops.interface import RopeTables

MASKED = -math.inf
"""Added to scores. exp of it is fast on the CPU; exp of large finite negatives is 15 times slower."""
LEAST = -1e30
"""Far below any score: the largest score of a row that sees nothing, finite so that differences are no NaN."""
_CHUNK_MULTIPLE = 16
_BLOCK_SCORES = 1 << 16
"""Most scores that a block of several tiles computes at once: fewer calls where there is little to do in each."""


@dataclass(slots=True)
class Mask:
    """The keys that one tile of a block hides."""

    tile: int
    """Within the block."""
    first: int
    """Sequences before it see the whole tile."""
    hidden: Tensor
    """[sequences - first, 1, rows of the block, T]: 0 or MASKED."""


@dataclass(slots=True)
class Block:
    """Successive key tiles that are computed at once. The same first sequences of the group reach all of them."""

    sequences: int
    first_row: int
    """Query rows before this one lie before the block's first key in every sequence, so they are skipped."""
    index: Tensor
    """[tiles * sequences * K * 2 (key, value) * pages per tile] int64: page parts of layer 0 in the flat pool."""
    begin: int
    """Position of the first key."""
    tiles: int


@dataclass(slots=True)
class Group:
    """Sequences with equally many query rows, longest first."""

    tokens: int
    """Query tokens of each sequence, padded."""
    rows: int
    """Query rows per KV head: tokens * query heads per KV head, padded to the row tile."""
    source: Tensor
    """[sequences * tokens] int64: row of the step for each query token; padding repeats a sequence's last."""
    real: Tensor | None
    """Indices into `source` that are not padding; None where all are real."""
    position: Int64
    """[sequences, tokens] absolute positions; padding repeats the last."""
    blocks: list[Block]
    masks: dict[tuple[int, int], list[list[Mask]]] = field(default_factory=dict)
    """(Window, chunk) -> the masks of each block."""


@dataclass(slots=True)
class TorchPlan:
    """The plan of a step for the torch reference."""

    rows: int
    real_rows: int
    position: Tensor
    """[rows] int64; padding 0."""
    write_index: Tensor
    """[real rows, K] int64: token vectors of layer 0's keys in the flat pool."""
    groups: list[Group]
    tile: int
    page_size: int
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines of the rows, by the address of their table; filled by the first layer that uses it."""

    def rotate_by(self, rope: RopeTables) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the step's rows, each [rows, 1, D / 2], from tables by position. They are
        gathered once per table and kept in the plan. With tables of one row, all rows get that row."""
        table = rope.cos.data_ptr()
        if table not in self.rotations:
            row = self.position if rope.stride else torch.zeros_like(self.position)
            self.rotations[table] = rope.cos[row][:, None], rope.sin[row][:, None]
        return self.rotations[table]


def plan_step(
    pages: Tensor,
    rows: int,
    position: Int32,
    count: Int32,
    page_table: Int32,
    *,
    heads_per_kv: int,
    tile: int,
    row_tile: int,
) -> TorchPlan:
    """Make the plan that `Ops.plan` describes: the position of each row, the place in the pool of each real row's key,
    and groups of sequences.

    Padding rows have the position 0. `heads_per_kv`: query heads per KV head. `tile`: keys of a tile, a multiple of the
    page size. Query rows of a group are padded to a multiple of `row_tile`.
    """
    _, kv_heads, layers, _, page_size, _ = pages.shape
    real_rows = int(count.sum())
    first_row = np.cumsum(count) - count
    sequence = np.repeat(np.arange(count.size), count)
    row_position = np.zeros(rows, np.int64)
    row_position[:real_rows] = position[sequence] + (np.arange(real_rows) - first_row[sequence])
    real = row_position[:real_rows]
    page = page_table[sequence, real // page_size].astype(np.int64)
    head = np.arange(kv_heads)
    write = ((page[:, None] * kv_heads + head) * (layers * 2)) * page_size + (real % page_size)[:, None]
    planner = _Planner(
        position, count, page_table, first_row, kv_heads, layers, page_size, heads_per_kv, tile, row_tile
    )
    return TorchPlan(
        rows, real_rows, torch.from_numpy(row_position), torch.from_numpy(write), planner.groups(), tile, page_size
    )


@dataclass(slots=True)
class _Planner:
    position: Int32
    count: Int32
    page_table: Int32
    first_row: Int64
    kv_heads: int
    layers: int
    page_size: int
    heads_per_kv: int
    tile: int
    row_tile: int

    def groups(self) -> list[Group]:
        """Return the groups of the step: sequences with equally many tokens, where more than one token are rounded up
        to a multiple of 16."""
        padded = np.where(self.count == 1, 1, -(-self.count // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
        return [self._group(int(tokens), np.flatnonzero(padded == tokens)) for tokens in np.unique(padded)]

    def _group(self, tokens: int, members: Int64) -> Group:
        """Return the group of the sequences `members` (indices), each padded to `tokens` tokens: longest first, with
        their rows, positions and key blocks. Padding repeats a sequence's last token."""
        end = self.position[members] + self.count[members]
        order = np.argsort(-end, kind="stable")
        members, end = members[order], end[order]
        offset = np.minimum(np.arange(tokens)[None, :], self.count[members][:, None] - 1)
        source = (self.first_row[members][:, None] + offset).reshape(-1)
        is_real = np.arange(tokens)[None, :] < self.count[members][:, None]
        real = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real))
        position = self.position[members][:, None].astype(np.int64) + offset
        rows = -(-tokens * self.heads_per_kv // self.row_tile) * self.row_tile
        blocks = self._blocks(members, end, position[:, 0], rows)
        return Group(tokens, rows, torch.from_numpy(source), real, position, blocks)

    def _blocks(self, members: Int64, end: Int32, first: Int64, rows: int) -> list[Block]:
        """Return the group's blocks of key tiles, in the order of positions, with the pool indices of their keys and
        values.

        `end` is the number of keys of each sequence, in descending order; `first` is the position of its first query.
        Pages after a sequence's end are read as page 0. A block skips the whole row tiles of queries that lie before
        its keys in every sequence.
        """
        pages_per_tile = self.tile // self.page_size
        tiles = -(-int(end[0]) // self.tile)
        page = np.arange(tiles * pages_per_tile)
        width = min(page.size, self.page_table.shape[1])
        table = np.zeros((members.size, page.size), np.int64)
        table[:, :width] = self.page_table[members, :width]
        # Pages after a sequence's last token are allocated but may be stale, so the dummy page is read instead.
        table[page[None, :] * self.page_size >= end[:, None]] = 0
        heads = np.arange(self.kv_heads)[None, :, None]
        parts = (table[:, None, :] * self.kv_heads + heads) * (self.layers * 2)
        parts = parts.reshape(members.size, self.kv_heads, tiles, 1, pages_per_tile)
        blocks = []
        for at, count, reached in self._runs(end, tiles, rows):
            key = parts[:reached, :, at : at + count]
            # Keys and values of an item lie side by side, as in the pool, which makes reads faster.
            both = np.concatenate((key, key + 1), axis=3)
            index = torch.from_numpy(both.transpose(2, 0, 1, 3, 4).reshape(-1))
            begin = at * self.tile
            skipped = int(np.maximum(0, begin - first[:reached]).min()) * self.heads_per_kv
            blocks.append(Block(reached, skipped // self.row_tile * self.row_tile, index, begin, count))
        return blocks

    def _runs(self, end: Int32, tiles: int, rows: int) -> list[tuple[int, int, int]]:
        """Return (first tile, number of tiles, number of sequences that reach them) for each block.

        A block joins neighbouring tiles that the same sequences reach, as long as together they have at most
        _BLOCK_SCORES scores; a single tile may have more. `end` is the number of keys of each sequence, and `rows` is
        the number of query rows per KV head.
        """
        reached = np.count_nonzero(end[None, :] > np.arange(tiles)[:, None] * self.tile, axis=1).tolist()
        runs: list[tuple[int, int, int]] = []
        for at, sequences in enumerate(reached):
            scores = sequences * self.kv_heads * rows * self.tile
            if runs and runs[-1][2] == sequences and (runs[-1][1] + 1) * scores <= _BLOCK_SCORES:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, sequences)
            else:
                runs.append((at, 1, sequences))
        return runs


def group_masks(group: Group, window: int, chunk: int, tile: int, heads_per_kv: int) -> list[list[Mask]]:
    """Return the masks of each of a group's blocks, under a window or chunks of this many positions (0: none). They are
    computed once for each pair of both and kept in the group."""
    if (window, chunk) not in group.masks:
        group.masks[window, chunk] = [
            [
                mask
                for number in range(block.tiles)
                if (mask := _mask(group, block, number, window, chunk, tile, heads_per_kv)) is not None
            ]
            for block in group.blocks
        ]
    return group.masks[window, chunk]


def _mask(
    group: Group, block: Block, number: int, window: int, chunk: int, tile: int, heads_per_kv: int
) -> Mask | None:
    """Return the mask of tile `number` of a block, or None if every row sees all of the tile's keys.

    The mask hides keys after a row's position, keys outside its window, and keys before its chunk. It begins with the
    first sequence that needs one; all sequences after that are in it.
    """
    begin = block.begin + number * tile
    position = group.position[: block.sequences, block.first_row // heads_per_kv :]
    needs = position[:, 0] < begin + tile - 1
    if window:
        needs |= position[:, -1] - window >= begin
    if chunk:
        needs |= position[:, -1] // chunk * chunk > begin
    if not needs.any():
        return None
    first = int(needs.argmax())
    query = np.repeat(position[first:], heads_per_kv, axis=1)[:, :, None]
    # first_row is a multiple of the row tile, not of the heads: drop the heads of its token that lie before it.
    query = query[:, block.first_row % heads_per_kv :]
    key = begin + np.arange(tile)
    hidden = key > query
    if window:
        hidden |= key <= query - window
    if chunk:
        hidden |= key < query // chunk * chunk
    return Mask(number, first, torch.from_numpy(np.where(hidden, np.float32(MASKED), np.float32(0.0)))[:, None])
