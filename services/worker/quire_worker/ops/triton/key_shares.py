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
_MOST_PARTS = 64
# Keys of a share that is worth being merged where the device is busy without it.
_LONG = 512
# Times that the device may be filled: one share a program leaves it idle when the first have ended.
_ROUNDS = 4
_GROWTH = 1.25


def most_shares(sequences: int, programs: int) -> int:
    """Room for the shares of so many sequences, where `programs` fill the device."""
    return sequences and sequences + _ROUNDS * programs


def share_keys(length: Int32, programs: int, room: int) -> Int32:
    """[COLUMNS, room] for sequences of these lengths, at least as many shares as `programs` where the keys suffice;
    `room` as of most_shares for so many sequences or more. SEQUENCE is -1 where there is no share."""
    shares = np.zeros((COLUMNS, room), np.int32)
    shares[SEQUENCE] = -1
    count = len(length)
    if not count:
        return shares
    parts = _parts(length, programs, room)
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


def _parts(length: Int32, programs: int, room: int) -> Int32:
    """Shares of each sequence: even pieces, long where the device is busy, as short as it takes where it is not."""
    longest, total = int(length.max()), int(length.sum())
    piece = max(_TILE, -(-longest // _MOST_PARTS), total // room, min(_LONG, total // programs))
    while True:
        parts: Int32 = -(-length // (-(-piece // _TILE) * _TILE))
        if piece >= longest or int(parts.sum()) <= room:
            return parts
        piece = int(piece * _GROWTH) + 1
