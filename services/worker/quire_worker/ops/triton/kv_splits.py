"""KV splits: the keys of decoding sequences are divided among programs so that all programs end at about the same time.

The keys of a long sequence are cut into several splits; the keys of a short one are one split. Programs take the
longest splits first (LPT scheduling: Graham, 1969), so that none begins when the others end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_worker.arrays import Int32

if TYPE_CHECKING:
    from quire_worker.ops.interface import HeadShape

SEQUENCE, BEGIN, END, PART, FIRST_PART, PARTS, FIRST_OF_SEQUENCE, PARTS_OF_SEQUENCE = range(8)
"""The columns, which are the rows of the array [COLUMNS, places]. The first six describe the split at a place: its
sequence, its keys [begin, end), its index in the order of sequences, the index of its sequence's first split, and the
number of splits of its sequence. The last two columns give these two numbers by sequence."""
COLUMNS = 8
NARROW, WIDE = 32, 64
"""The number of keys of a kernel's tile. A split has a multiple of it. A device runs half as many programs with wide
tiles at once as with narrow ones."""
# Wide tiles are faster for up to so many sequences, if a KV head has so many query heads: splits are longer, and fewer
# are merged. With larger heads, one program would fill a multiprocessor.
_WIDE_UNTIL, _WIDE_FROM_HEADS, _WIDE_DIM = 2, 4, 128
# The greatest number of splits of the longest sequence.
_CUTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
# A cost model, in keys, fitted to times of an H200 (bench/LOG.md): the cost of a split beside its keys; the cost of
# merging all splits, by the last program that ends or by a second kernel; how far programs drift apart, as a part of a
# split; and how much it costs that some programs have no work in the last round, in which the others are faster.
_BEGIN, _MERGE, _MERGE_APART, _DRIFT, _IDLE = 40, 32, 64, 0.07, 0.3
# A program runs faster by this factor when other programs are missing than when the device is full. If lengths differ,
# the longest split ends last, and did not run faster.
_ALONE = 2
# Splits of this many keys are short enough to fill the device.
_SHORT = 256
LAST_MERGES_FROM = 24
"""From this number of sequences on, the program that ends last merges the splits, instead of a second kernel."""
# How often the splits may fill the device. A few sequences need no more.
_ROUNDS, _FEW_ROUNDS, _FEW = 3, 2, 16
_EVEN = 0.9
_GROWTH = 1.25


def wide_until(shape: HeadShape) -> int:
    """Return the largest number of sequences for which the kernel has wide tiles."""
    suits = shape.heads >= _WIDE_FROM_HEADS * shape.kv_heads and shape.head_dim <= _WIDE_DIM
    return _WIDE_UNTIL if suits else 0


def tile_of(sequences: int, wide: int) -> int:
    """Return the number of keys of a tile for this number of sequences; `wide` is the result of wide_until."""
    return WIDE if sequences <= wide else NARROW


def max_splits(sequences: int, programs: int) -> int:
    """Return for how many places the splits of this many sequences need room, on a device that runs `programs` programs
    of a KV head at once; 0 without sequences."""
    return sequences and sequences + (_ROUNDS if sequences >= _FEW else _FEW_ROUNDS) * programs


def split_keys(length: Int32, programs: int, room: int, tile: int = NARROW) -> Int32:
    """Return [COLUMNS, room] splits for sequences of these lengths, the longest splits first. The keys of a sequence
    are cut into equal splits of whole tiles; the last one ends with the sequence. The number of splits is the one with
    the least estimated time, up to 64 for the longest sequence, or fewer if `room` is too small. SEQUENCE is -1 at a
    place without a split.

    `programs` is the number of programs with narrow tiles that the device runs at once for each KV head. `room` is the
    result of max_splits for at least this number of sequences.
    """
    splits = np.zeros((COLUMNS, room), np.int32)
    splits[SEQUENCE] = -1
    count = len(length)
    if not count:
        return splits
    parts = _parts(length, -(-programs * NARROW // tile), room, tile)
    used = int(parts.sum())
    owner = np.repeat(np.arange(count), parts)
    first = np.cumsum(parts) - parts
    index = np.arange(used) - first[owner]
    keys = -(-length // parts)
    each = -(-keys // tile) * tile
    begin = index * each[owner]
    end = np.minimum(begin + each[owner], length[owner])
    order = np.argsort(begin - end, kind="stable")
    by_split = (owner, begin, end, first[owner] + index, first[owner], parts[owner])
    for column, values in zip(splits, by_split, strict=False):
        column[:used] = values[order]
    splits[FIRST_OF_SEQUENCE, :count] = first
    splits[PARTS_OF_SEQUENCE, :count] = parts
    return splits


def extend_splits(splits: Int32, before: Int32, length: Int32, tile: int) -> bool:
    """Update the result of split_keys for sequences that have grown from the lengths `before` to `length`: the last
    split of each sequence takes its new keys. Returns False, and changes nothing, if the last tile of some sequence has
    no room left."""
    if not np.array_equal((before - 1) // tile, (length - 1) // tile):
        return False
    owner, ends = splits[SEQUENCE], splits[END]
    last = np.flatnonzero((owner >= 0) & (ends == before[owner]))
    ends[last] = length[owner[last]]
    return True


def _parts(length: Int32, programs: int, room: int, tile: int) -> Int32:
    """Return the number of splits of each sequence. All splits have about the same number of keys, a multiple of
    `tile`.

    The longest sequence is cut into the number of splits with the least estimated time, among those of _CUTS that do
    not make splits too short. Splits grow by a quarter until
    all fit into `room`, or no sequence is cut.
    """
    longest, total, count = int(length.max()), int(length.sum()), len(length)
    least = min(_SHORT, 2 * total // programs)
    cuts = [cut for cut in _CUTS if cut == 1 or _piece(longest, cut, tile) >= least]
    best = min(cuts, key=lambda cut: _time(longest, total, count, cut, programs, tile))
    piece = _piece(longest, best, tile)
    while True:
        parts: Int32 = -(-length // piece)
        if piece >= longest or int(parts.sum()) <= room:
            return parts
        piece = _piece(int(piece * _GROWTH) + 1, 1, tile)


def _piece(length: int, cut: int, tile: int) -> int:
    return -(-length // (cut * tile)) * tile


def _time(longest: int, total: int, count: int, cut: int, programs: int, tile: int) -> float:
    """Estimate the time of `count` sequences with `total` keys, in units of keys, if the longest is cut into `cut`
    splits. A program that has ended a split takes the next one; the shortest come last."""
    piece = _piece(longest, cut, tile)
    even = total >= _EVEN * count * longest
    splits = count * cut if even else max(count, total / piece + count / 2)
    idle = _IDLE * (-splits % programs) * min(piece, total / count)
    busy = max((total + _BEGIN * splits + idle) / programs, piece / _ALONE if even else piece)
    merge = 0 if cut == 1 else _MERGE if count >= LAST_MERGES_FROM else _MERGE_APART
    return busy + merge + _DRIFT * piece
