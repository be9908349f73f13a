"""How the keys of decoding sequences are shared out among programs: by length, so that all end at about one time.

A long sequence is cut into shares, a short one is a share by itself. The longest shares are taken first (LPT: Graham,
1969), so that none begins when the others end.
"""

from __future__ import annotations

import numpy as np

from quire_worker.step import Int32

SEQUENCE, BEGIN, END, PART, FIRST_PART, PARTS, FIRST_OF_SEQUENCE, PARTS_OF_SEQUENCE = range(8)
"""The columns. By share: whose keys, [begin, end) of them, this share's place among all, that of its sequence's first
share, and how many its sequence has. By sequence: the last two again."""
COLUMNS = 8
_TILE = 32
_MOST_PARTS = 32
_GROWTH = 1.25


def most_shares(sequences: int, programs: int) -> int:
    """Room for the shares of so many sequences, where `programs` keep the device busy."""
    return 0 if not sequences else max(programs, sequences + sequences // 4)


def share_keys(length: Int32, room: int) -> Int32:
    """[COLUMNS, room] for at most `room` sequences of these lengths; SEQUENCE is -1 where there is no share."""
    shares = np.zeros((COLUMNS, room), np.int32)
    shares[SEQUENCE] = -1
    count = len(length)
    if not count:
        return shares
    parts = _parts(length, room)
    used = int(parts.sum())
    owner = np.repeat(np.arange(count), parts)
    first = np.cumsum(parts) - parts
    index = np.arange(used) - first[owner]
    keys = -(-length // parts)
    each = -(-keys // _TILE) * _TILE
    begin = index * each[owner]
    end = np.minimum(begin + each[owner], length[owner])
    order = np.argsort(begin - end, kind="stable")
    by_share = (owner, begin, end, first[owner] + index, first[owner], parts[owner])
    for column, values in zip(shares, by_share, strict=False):
        column[:used] = values[order]
    shares[FIRST_OF_SEQUENCE, :count] = first
    shares[PARTS_OF_SEQUENCE, :count] = parts
    return shares


def _parts(length: Int32, room: int) -> Int32:
    """Shares of each sequence: the shortest even pieces that there is room for."""
    longest = int(length.max())
    piece = max(_TILE, -(-longest // _MOST_PARTS), int(length.sum()) // room)
    while True:
        parts: Int32 = -(-length // (-(-piece // _TILE) * _TILE))
        if piece >= longest or int(parts.sum()) <= room:
            return parts
        piece = int(piece * _GROWTH) + 1
