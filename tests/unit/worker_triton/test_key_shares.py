"""Shares of keys: every key once, as even as there is room for, the longest first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire_worker.ops.triton.key_shares import (
    BEGIN,
    END,
    FIRST_OF_SEQUENCE,
    FIRST_PART,
    PART,
    PARTS,
    PARTS_OF_SEQUENCE,
    SEQUENCE,
    most_shares,
    share_keys,
)


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=20), st.integers(1, 40))
def test_every_key_is_in_one_share(lengths: list[int], programs: int) -> None:
    room = most_shares(len(lengths), programs)
    shares = share_keys(np.array(lengths, np.int32), room)
    used = int((shares[SEQUENCE] >= 0).sum())
    assert (shares[SEQUENCE, used:] == -1).all()
    sizes = shares[END, :used] - shares[BEGIN, :used]
    assert (np.diff(sizes) <= 0).all()
    assert sorted(shares[PART, :used].tolist()) == list(range(used))
    for sequence, length in enumerate(lengths):
        mine = shares[:, :used][:, shares[SEQUENCE, :used] == sequence]
        mine = mine[:, np.argsort(mine[PART])]
        assert (mine[PARTS] == mine.shape[1]).all()
        assert shares[PARTS_OF_SEQUENCE, sequence] == mine.shape[1]
        assert shares[FIRST_OF_SEQUENCE, sequence] == mine[FIRST_PART, 0]
        assert mine[PART].tolist() == [int(mine[FIRST_PART, 0]) + each for each in range(mine.shape[1])]
        keys = [key for begin, end in zip(mine[BEGIN], mine[END], strict=True) for key in range(begin, end)]
        assert keys == list(range(length))
        assert (mine[BEGIN] % 32 == 0).all()


def test_few_long_sequences_use_all_there_is_and_many_even_ones_stay_whole() -> None:
    assert (share_keys(np.full(8, 4096, np.int32), most_shares(8, 33))[SEQUENCE] >= 0).sum() == 32
    assert (share_keys(np.full(256, 640, np.int32), most_shares(256, 33))[PARTS].max()) == 1
    ragged = np.array([32_768] + [256] * 255, np.int32)
    shares = share_keys(ragged, most_shares(256, 33))
    assert shares[PARTS].max() > 8 and (shares[SEQUENCE] >= 0).sum() <= 320


def test_nobody_decodes() -> None:
    assert most_shares(0, 33) == 0
    assert share_keys(np.zeros(0, np.int32), 4)[SEQUENCE].tolist() == [-1] * 4
