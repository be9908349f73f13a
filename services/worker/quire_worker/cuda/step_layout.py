"""StepLayout: a step's columns in one buffer of int32, so that a step is one upload.

Columns have fixed places for a StepSize, each at a multiple of 16 bytes; page tables, whose width changes from step to
step, come last. The same offsets serve the pinned host side (numpy) and the device side (torch views).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_worker.matcher.mask_ring import stamp_of
from quire_worker.matcher.row_constraint import NO_MASK_SLOT
from quire_worker.ops.triton.attention_plan import PREFILL_ROWS, decode_programs, most_keys_first
from quire_worker.ops.triton.fresh_attention import Fresh
from quire_worker.ops.triton.kv_splits import COLUMNS, extend_splits, max_splits, split_keys, tile_of, wide_until
from quire_worker.sampling.param_rows import WORDS, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from quire_worker.arrays import Bool, Int32
    from quire_worker.cuda.step_size import StepSize
    from quire_worker.ops.interface import HeadShape
    from quire_worker.step import StepBatch

_ALIGN = 4
_NO_CONTROLS: Mapping[int, int] = MappingProxyType({})
NO_GRAMMAR, NO_MASK_SLOT_YET = -1, -2
"""Stand for the mask slot of sequences without a grammar, and of those that have no mask slot yet."""
STOP_IDS = 8
"""Stop ids per sequence that a captured step can check."""
_BY_SEQUENCE = (
    "slot", "position", "count", "first_row", "last_row", "wanted", "last", "blocked", "sample_position",
)  # fmt: skip  # a list of names
_OF_MASKS = ("mask_slot", "generation", "bound", "min_len")
_BY_ROW = ("token", "fed", "row_position", "row_sequence")


class Tiling(NamedTuple):
    """How attention cuts its work: the tokens of a prefill tile, and the number of KV splits (`programs`) that keep the
    device busy."""

    tokens: int
    programs: int
    even: bool = False
    """Decode rows are tiled like prefill rows, and there are no KV splits."""
    wide_until: int = 0
    """The most decode rows for which KV splits are made for wide tiles."""

    @classmethod
    def of(cls, shape: HeadShape, device: torch.device, *, even: bool = False) -> Tiling:
        """The tiling of a model's heads on a device."""
        tokens = max(1, PREFILL_ROWS // (shape.heads // shape.kv_heads))
        return cls(tokens, decode_programs(shape, device), even, wide_until(shape))


@dataclass(frozen=True)
class StepLayout:
    """Offsets and lengths, in int32, of each column."""

    size: StepSize
    stop_ids: int
    tiling: Tiling
    place: dict[str, tuple[int, int]]
    table_at: int
    fresh: tuple[Fresh, ...] | None = None
    """Chunks without tiles; None: there can be none, as in a step that is one graph."""
    tiled: bool = True
    """Whether there may be chunks with tiles."""

    @classmethod
    def of(cls, size: StepSize, tiling: Tiling, stop_ids: int = STOP_IDS, *, fresh: bool = False) -> StepLayout:
        """Place all columns of a step of this size, one after another at multiples of 16 bytes. Columns for controls,
        masks, KV splits and tiles exist only if the size needs them. `fresh`: prompt chunks may be left to cuDNN,
        without tiles."""
        place: dict[str, tuple[int, int]] = {}
        at = 0
        lengths = {"table_width": 1, "params": WORDS * size.sequences}
        lengths |= dict.fromkeys(_BY_SEQUENCE, size.sequences)
        if size.controlled:
            lengths["control"] = 2 * size.sequences
        if size.masked:
            lengths |= dict.fromkeys(_OF_MASKS, size.sequences)
        lengths["stop_id"] = size.sequences * stop_ids
        lengths |= dict.fromkeys(_BY_ROW, size.total_rows)
        if size.decodes and not tiling.even:
            lengths["split"] = COLUMNS * max_splits(size.decodes, tiling.programs)
        if tiles := size.tiles(tiling.tokens) + tiling.even * size.decodes:
            lengths |= dict.fromkeys(("tile_sequence", "tile_token"), tiles)
        for name, length in lengths.items():
            place[name] = (at, length)
            at += -(-length // _ALIGN) * _ALIGN
        return cls(size, stop_ids, tiling, place, at, () if fresh else None)

    def leaving(self, fresh: tuple[Fresh, ...], chunks: int) -> StepLayout:
        """Return the same layout for a step of `chunks` prefill chunks. The chunks in `fresh` go to cuDNN and have no
        tiles; their rows are counted from the first prefill row."""
        moved = tuple(Fresh(self.size.decodes + each.row, each.tokens) for each in fresh)
        return replace(self, fresh=moved, tiled=chunks > len(fresh))

    @property
    def others(self) -> list[tuple[int, int]]:
        """Ranges (first, end) of rows that belong to no fresh chunk, padding included. Empty if all rows but padding
        are fresh chunks'."""
        found, begin = list[tuple[int, int]](), 0
        if self.size.decodes or self.tiled:
            for row, tokens in sorted(self.fresh or ()):
                found.append((begin, row))
                begin = row + tokens
            found.append((begin, self.size.total_rows))
        return [(first, end) for first, end in found if first < end]

    def words(self, table_width: int) -> int:
        """Length of the buffer, in int32, with page tables of so many pages."""
        return self.table_at + self.size.sequences * table_width

    def pack_nobody(self, buffer: Tensor) -> None:
        """Write a step in which all rows are padding into a device buffer, with page tables of one page."""
        buffer[: self.words(1)] = 0
        for name in ("slot", "mask_slot", "stop_id", "row_position", "tile_sequence", "split"):
            if name in self.place:
                begin, length = self.place[name]
                buffer[begin : begin + length] = -1
        buffer[self.place["table_width"][0]] = 1

    def pack(self, batch: StepBatch, into: Int32, control: Mapping[int, int] = _NO_CONTROLS) -> int:
        """Write a batch that fits this size into a host buffer. Decoding sequences come first, then their padding, then
        prefill chunks and theirs. Returns how many words are used. Padding rows compute nothing. `control`: sequence ->
        address of its logits processor state."""
        size, count = self.size, batch.count
        decodes = int(np.count_nonzero(batch.fed))
        chunks = len(count) - decodes
        here = np.concatenate([np.arange(decodes), size.decodes + np.arange(chunks)])
        first = count.cumsum() - count
        first_row = np.where(np.arange(len(count)) < decodes, first, size.decodes + first - decodes)

        def column(name: str) -> Int32:
            begin, length = self.place[name]
            return into[begin : begin + length]

        def put(name: str, values: Int32 | Bool, padding: int = 0) -> None:
            """Write the values, one for each sequence, to the sequences' places in a column, and `padding` to the other
            places."""
            target = column(name)
            target.fill(padding)
            target[here] = values

        blocked = np.zeros(len(count), np.int32)
        blocked[list(batch.blocked)] = 1
        put("slot", batch.slot, -1)
        put("position", batch.position)
        put("count", count)
        put("first_row", first_row)
        put("last_row", first_row + count - 1)
        put("wanted", batch.sample)
        put("last", batch.last)
        put("blocked", blocked)
        put("sample_position", batch.position + count)
        params = column("params").reshape(-1, WORDS)
        params.fill(0)
        params[here] = words_of(batch.params)
        if size.controlled:
            addresses = column("control").view(np.int64)
            addresses.fill(0)
            for sequence, address in control.items():
                addresses[here[sequence]] = address
        stops = column("stop_id").reshape(size.sequences, self.stop_ids)
        stops.fill(-1)
        stops[here, : batch.stop_id.shape[1] if batch.stop_id.ndim == 2 else 0] = batch.stop_id
        if size.masked:
            mask_slot, generation = _mask_slots(batch)
            put("mask_slot", mask_slot, NO_GRAMMAR)
            put("generation", generation)
            put("bound", batch.bound)
            put("min_len", batch.min_len)
        self._pack_splits(batch.position[:decodes], into)
        self._pack_rows(batch, decodes, here, first, into)
        return self._pack_table(batch, decodes, here, into)

    def pack_next(self, batch: StepBatch, into: Int32, before: Int32) -> int:
        """Update a buffer that holds an earlier step of the same sequences, packed by this layout; all of them decode.
        Only positions, the flags of last tokens, KV splits and page tables are written. If possible, the KV splits that
        were made for the positions `before` are extended. Returns how many words are used."""
        count, position = len(batch.position), batch.position
        for name, values in (
            ("position", position),
            ("sample_position", position + 1),
            ("last", batch.last),
            ("row_position", position),
        ):
            begin = self.place[name][0]
            into[begin : begin + count] = values
        self._pack_splits(position, into, before)
        return self._pack_table(batch, count, slice(count), into)

    def _pack_splits(self, position: Int32, into: Int32, before: Int32 | None = None) -> None:
        """Write the KV splits of decoding sequences, if the layout has splits. If possible, the splits that were made
        for the positions `before` are extended."""
        if "split" in self.place:
            begin, length = self.place["split"]
            splits = into[begin : begin + length].reshape(COLUMNS, -1)
            tile = tile_of(self.size.decodes, self.tiling.wide_until)
            if before is None or not extend_splits(splits, before + 1, position + 1, tile):
                splits[:] = split_keys(position + 1, self.tiling.programs, splits.shape[1], tile)

    def _pack_table(self, batch: StepBatch, decodes: int, here: Int32 | slice, into: Int32) -> int:
        """Write into `into` the width of the batch's page tables, and each sequence's table at its place in `here`.
        Places without a sequence get zeros; `decodes` is how many of the sequences decode. Returns how many int32
        words the whole step takes."""
        size, width = self.size, batch.page_table.shape[1]
        into[self.place["table_width"][0]] = width
        table = into[self.table_at : self.table_at + size.sequences * width].reshape(size.sequences, width)
        table[decodes : size.decodes] = 0
        table[size.decodes + len(batch.count) - decodes :] = 0
        table[here] = batch.page_table
        return self.words(width)

    def _pack_rows(self, batch: StepBatch, decodes: int, here: Int32, first: Int32, into: Int32) -> None:
        """Write the columns by row (token, fed, position, sequence), padding included, and the tiles of prefill chunks
        that are not left to cuDNN, and of decode rows if the tiling is `even`. Tiles with most keys come first."""
        size, count = self.size, batch.count
        rows = len(batch.token)
        prefill = slice(size.decodes, size.decodes + rows - decodes)

        def column(name: str) -> Int32:
            begin, length = self.place[name]
            return into[begin : begin + length]

        token, fed, position, sequence = (column(name) for name in _BY_ROW)
        token.fill(0)
        fed.fill(0)
        position.fill(-1)
        sequence.fill(0)
        fed[:decodes] = 1
        position[:decodes] = batch.position[:decodes]
        sequence[:decodes] = np.arange(decodes)
        if rows > decodes:
            owner = np.repeat(np.arange(decodes, len(count)), count[decodes:])
            token[prefill] = batch.token[decodes:]
            position[prefill] = batch.position[owner] + np.arange(decodes, rows) - first[owner]
            sequence[prefill] = here[owner]
        if "tile_sequence" in self.place:
            tile_sequence, tile_token = column("tile_sequence"), column("tile_token")
            tile_sequence.fill(-1)
            tiled = count.copy()
            if not self.tiling.even:
                tiled[:decodes] = 0
            tiled[np.isin(first - decodes + size.decodes, [chunk.row for chunk in self.fresh or ()])] = 0
            tiles = -(-tiled // self.tiling.tokens)
            owner = np.repeat(np.arange(len(tiles)), tiles)
            begin = (np.arange(len(owner)) - (tiles.cumsum() - tiles)[owner]) * self.tiling.tokens
            order = most_keys_first(batch.position[owner] + begin)
            tile_sequence[: len(owner)] = here[owner[order]]
            tile_token[: len(owner)] = begin[order]


def _mask_slots(batch: StepBatch) -> tuple[Int32, Int32]:
    """Return two columns [S]: the mask slots of sequences that sample by a grammar, and their generation as in the
    stamps of masks. Without a grammar the slot is NO_GRAMMAR, without a mask slot NO_MASK_SLOT_YET."""
    mask_slot = np.full(len(batch.count), NO_GRAMMAR, np.int32)
    generation = np.zeros(len(batch.count), np.int32)
    for sequence, constraint in batch.constraints.items():
        mask_slot[sequence] = NO_MASK_SLOT_YET if constraint.mask_slot == NO_MASK_SLOT else constraint.mask_slot
        generation[sequence] = stamp_of(constraint.generation, 0) >> 32
    return mask_slot, generation
