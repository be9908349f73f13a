"""What shares of keys must be, however they came about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire_worker.arrays import Int32
from quire_worker.ops.triton.kv_splits import (
    BEGIN,
    END,
    FIRST_OF_SEQUENCE,
    FIRST_PART,
    PART,
    PARTS,
    PARTS_OF_SEQUENCE,
    SEQUENCE,
)


def check_shares(splits: Int32, lengths: Sequence[int], tile: int) -> None:
    """Every key is in one share, and shares say of their sequence what it says of them."""
    used = int((splits[SEQUENCE] >= 0).sum())
    assert (splits[SEQUENCE, used:] == -1).all()
    assert sorted(splits[PART, :used].tolist()) == list(range(used))
    for sequence, length in enumerate(lengths):
        mine = splits[:, :used][:, splits[SEQUENCE, :used] == sequence]
        mine = mine[:, np.argsort(mine[PART])]
        assert (mine[PARTS] == mine.shape[1]).all()
        assert splits[PARTS_OF_SEQUENCE, sequence] == mine.shape[1]
        assert splits[FIRST_OF_SEQUENCE, sequence] == mine[FIRST_PART, 0]
        assert mine[PART].tolist() == [int(mine[FIRST_PART, 0]) + each for each in range(mine.shape[1])]
        keys = [key for begin, end in zip(mine[BEGIN], mine[END], strict=True) for key in range(begin, end)]
        assert keys == list(range(length))
        assert (mine[BEGIN] % tile == 0).all()
