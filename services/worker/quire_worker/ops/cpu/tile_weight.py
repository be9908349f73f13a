"""Repacks weights into the tiles that linear.py reads: for one input after the other, the weights of LANES outputs.

Quantised values become 4-bit integers with scales if their range has at most 16 levels, else 8-bit integers with
scales. bfloat16 and float16 stay 16-bit. The values are exactly those of the file, except for the sign of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from quire_common.gguf.block_kinds import KIND_NAMED, BlockKind
from quire_worker.arrays import Float32
from quire_worker.ops.cpu.linear import BLOCK_SIZE, Scales
from quire_worker.ops.cpu.simd import LANES
from quire_worker.ops.weight import DenseWeight, StoredRows, StoredWeight, TiledWeight, Tiles
from quire_worker.weights.gguf.dequantize import is_quantised, quants

_EMPTY: Final = np.zeros(0, np.float32)
_UNQUANTISED_FORMATS: Final[dict[str, tuple[str, type[np.generic]]]] = {
    "F32": ("floats", np.float32),
    "F16": ("floats", np.uint16),
    "BF16": ("bfloat16", np.uint16),
}
_CHUNK_ROWS: Final = 64 * LANES
"""Rows that are repacked at once. The bound limits the memory that repacking takes beside the tiles."""


def tile_weight(weight: DenseWeight | StoredWeight) -> TiledWeight:
    """Repack a weight into tiles of LANES outputs. Neighbouring parts of one storage kind form a segment. The bias
    becomes float32, padded with zeros.

    A DenseWeight becomes float32. If a part other than the last one does not end at a tile boundary, all parts do.
    """
    blocks = -(-weight.inputs // BLOCK_SIZE)
    parts = [_as_floats(weight.data)] if isinstance(weight, DenseWeight) else list(weight.parts)
    if any(part.data.shape[0] % LANES for part in parts[:-1]):
        parts = [_as_floats(torch.cat([part.values() for part in parts]))]
    segments, first_output = [], 0
    for same_kind in _group_by_kind(parts):
        segments.append(_tile_rows(same_kind, first_output, blocks))
        first_output += segments[-1].num_tiles * LANES
    bias = np.zeros(sum(segment.num_tiles for segment in segments) * LANES, np.float32)
    if weight.bias is not None:
        bias[: weight.outputs] = weight.bias.to(torch.float32).numpy()
    return TiledWeight(tuple(segments), bias, weight.outputs, weight.inputs, blocks)


def _as_floats(data: torch.Tensor) -> StoredRows:
    return StoredRows(KIND_NAMED["F32"], data.to(torch.float32).contiguous().view(torch.uint8))


def _group_by_kind(parts: Sequence[StoredRows]) -> list[list[StoredRows]]:
    """Return runs of neighbouring parts that have the same storage kind, in order."""
    runs: list[list[StoredRows]] = []
    for part in parts:
        if runs and runs[-1][0].kind == part.kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _tile_rows(parts: Sequence[StoredRows], first_output: int, blocks: int) -> Tiles:
    """Repack rows of one kind into tiles from output `first_output` on, 1024 rows at a time. Rows of zeros fill up the
    last tile. Scales become float16 if that is exact."""
    kind = parts[0].kind
    rows = torch.cat([part.data for part in parts]) if len(parts) > 1 else parts[0].data
    raw = rows.numpy()
    chunks = [_tile_chunk(kind, raw[at : at + _CHUNK_ROWS], blocks) for at in range(0, len(raw), _CHUNK_ROWS)]
    data = np.concatenate([chunk[1].reshape(-1) for chunk in chunks])
    scale = np.concatenate([chunk[2].reshape(-1) for chunk in chunks])
    offset = np.concatenate([chunk[3].reshape(-1) for chunk in chunks])
    return Tiles(chunks[0][0], data, *_as_float16_if_exact(scale, offset), first_output, -(-len(raw) // LANES))


def _tile_chunk(kind: BlockKind, raw: NDArray[np.uint8], blocks: int) -> tuple[str, NDArray[Any], Float32, Float32]:
    """Return storage format, data, scale and offset of a chunk of rows, lanes last. Rows of zeros fill up the last
    tile.

    Unquantised rows have empty scales and offsets; quantised rows that need no offset have empty offsets. Quantised
    rows become 4-bit integers where the kind allows it, with the lowest value in the offset; else 8-bit integers.
    """
    padding_rows = -len(raw) % LANES
    if padding_rows:
        raw = np.concatenate([raw, np.zeros((padding_rows, raw.shape[1]), np.uint8)])
    if not is_quantised(kind):
        storage, dtype = _UNQUANTISED_FORMATS[kind.name]
        rows = raw.view(dtype)
        rows = np.pad(rows, ((0, 0), (0, blocks * BLOCK_SIZE - rows.shape[1])))
        return storage, _lanes_last(rows.reshape(len(rows), blocks, BLOCK_SIZE)), _EMPTY, _EMPTY
    quantised = quants(kind, np.ascontiguousarray(raw).reshape(-1))
    groups = BLOCK_SIZE // quantised.integer.shape[2]
    shape = (len(raw), blocks, groups)
    scale, offset, lowest_nibble = quantised.scale.reshape(shape), quantised.offset, quantised.nibbles_from
    if offset is None and lowest_nibble:
        offset = quantised.scale * np.float32(lowest_nibble)
    integer = quantised.integer.reshape(len(raw), blocks, 2, BLOCK_SIZE // 2)
    half = "half_block_" if groups == 2 else ""
    if lowest_nibble is None:
        storage = half + "int8" if half or offset is None else "int8_with_offset"
        data = _lanes_last(integer.reshape(len(raw), blocks, BLOCK_SIZE))
    else:
        storage = half + "uint4"
        nibble = (integer - np.int8(lowest_nibble)).view(np.uint8)
        data = _lanes_last(nibble[:, :, 0] | (nibble[:, :, 1] << np.uint8(4)))
    offsets = _EMPTY if offset is None else _lanes_last(offset.reshape(shape))
    return storage, data, _lanes_last(scale), offsets


def _as_float16_if_exact(scale: Float32, offset: Float32) -> tuple[Scales, Scales]:
    """Return scale and offset as bits of float16 (uint16) if no value of either changes; else both unchanged as
    float32. Many kinds of blocks store their scales as float16."""
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16), offset.astype(np.float16)
    if all(np.array_equal(half, whole, equal_nan=True) for half, whole in zip(halves, (scale, offset), strict=True)):
        return halves[0].view(np.uint16), halves[1].view(np.uint16)
    return scale, offset


def _lanes_last(rows: NDArray[Any]) -> NDArray[Any]:
    """[tiles * LANES, blocks, n] -> [tiles, blocks, n, LANES]."""
    return np.ascontiguousarray(rows.reshape(-1, LANES, *rows.shape[1:]).transpose(0, 2, 3, 1))
