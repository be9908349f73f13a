"""How the keys of decoding sequences are shared out among programs: by length, so that all end at about one time.

A long sequence is cut into shares, a short one is a share by itself. The longest shares are taken first (LPT: Graham,
1969), so that none begins when the others end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_worker.arrays import Int32

if TYPE_CHECKING:
    from quire_worker.ops.interface import HeadShape

SEQUENCE, BEGIN, END, PART, FIRST_PART, PARTS, FIRST_OF_SEQUENCE, PARTS_OF_SEQUENCE = range(8)
"""The columns. By share: whose keys, [begin, end) of them, this share's place among all, that of its sequence's first
share, and how many its sequence has. By sequence: the last two again."""
COLUMNS = 8
NARROW, WIDE = 32, 64
"""Keys of a kernel's tile, a multiple of which a share has. Of programs with wide ones half as many fit the device."""
# So many sequences are better off with wide tiles where a KV head has so many query heads: shares are longer, and fewer
# are merged. Of larger heads one program would fill a multiprocessor.
_WIDE_UNTIL, _WIDE_FROM_HEADS, _WIDE_DIM = 2, 4, 128
# Parts that the longest sequence may be cut into.
_CUTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
# Fitted to times of an H200 (bench/LOG.md), in keys: what a share costs beside its keys; all shares' being merged, by
# the last to end or by a second kernel; how much of a share programs drift apart; and how much it matters that some
# have nothing to do in the last round, since others are faster then.
_BEGIN, _MERGE, _MERGE_APART, _DRIFT, _IDLE = 40, 32, 64, 0.07, 0.3
# So much faster is a program when others are missing than when the device is full; where lengths differ it is the
# longest share that ends last, and that gained nothing.
_ALONE = 2
# Shares of so many keys need not be shorter for the device to be full.
_SHORT = 256
LAST_MERGES_FROM = 32
"""So many sequences: whoever ends last merges, instead of a second kernel."""
# Times that the device may be filled: a few sequences need no more.
_ROUNDS, _FEW_ROUNDS, _FEW = 3, 2, 16
_EVEN = 0.9
_GROWTH = 1.25


def wide_until(shape: HeadShape) -> int:
    """A kernel for so many sequences or fewer has wide tiles."""
    suits = shape.heads >= _WIDE_FROM_HEADS * shape.kv_heads and shape.head_dim <= _WIDE_DIM
    return _WIDE_UNTIL if suits else 0


def tile_of(sequences: int, wide: int) -> int:
    """Keys of a tile for so many sequences; `wide` as of wide_until."""
    return WIDE if sequences <= wide else NARROW


def max_splits(sequences: int, programs: int) -> int:
    """Room for the shares of so many sequences, where `programs` fill the device."""
    return sequences and sequences + (_ROUNDS if sequences >= _FEW else _FEW_ROUNDS) * programs


def split_keys(length: Int32, programs: int, room: int, tile: int = NARROW) -> Int32:
    """[COLUMNS, room] for sequences of these lengths, at least as many shares as fit the device (`programs` with narrow
    tiles) where the keys suffice; `room` as of max_splits for so many sequences or more. SEQUENCE is -1 where there is
    no share."""
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
    """Change what split_keys gave for sequences of the lengths `before` into shares of the same ones that have grown
    to `length`: the last of each takes the new keys. False where one has no room left in its last tile: nothing was
    done then."""
    if not np.array_equal((before - 1) // tile, (length - 1) // tile):
        return False
    owner, ends = splits[SEQUENCE], splits[END]
    last = np.flatnonzero((owner >= 0) & (ends == before[owner]))
    ends[last] = length[owner[last]]
    return True


def _parts(length: Int32, programs: int, room: int, tile: int) -> Int32:
    """Shares of each sequence: even pieces, of the size with which the last program is likely to end first."""
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
    """In keys, about; of `count` sequences, the longest of which is cut so often. Programs take the next share when
    they have ended one, the shortest last."""
    piece = _piece(longest, cut, tile)
    even = total >= _EVEN * count * longest
    splits = count * cut if even else max(count, total / piece + count / 2)
    idle = _IDLE * (-splits % programs) * min(piece, total / count)
    busy = max((total + _BEGIN * splits + idle) / programs, piece / _ALONE if even else piece)
    merge = 0 if cut == 1 else _MERGE if count >= LAST_MERGES_FROM else _MERGE_APART
    return busy + merge + _DRIFT * piece
