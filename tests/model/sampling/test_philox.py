from __future__ import annotations

import numpy as np
import pytest

from quire_worker.arrays import UInt64
from quire_worker.sampling.philox import philox, split_seed

# Random123's known answers for philox4x32-10.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def word(value: int) -> UInt64:
    return np.array([value], np.uint64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = map(word, counter)
    found = philox((c0, c1, c2, c3), (word(key[0]), word(key[1])))
    assert tuple(int(each[0]) for each in found) == answer


def test_words_broadcast_and_do_not_depend_on_each_other() -> None:
    blocks, rows = np.arange(5, dtype=np.uint64)[None, :], np.arange(3, dtype=np.uint64)[:, None]
    zero = np.zeros((1, 1), np.uint64)
    whole = philox((blocks, rows, zero, zero), (rows, zero))
    alone = philox((word(4), word(2), word(0), word(0)), (word(2), word(0)))
    assert [int(each[2, 4]) for each in whole] == [int(each[0]) for each in alone]


def test_a_seed_splits_into_low_and_high_halves() -> None:
    low, high = split_seed(np.array([0x0123456789ABCDEF], np.uint64))
    assert (int(low[0]), int(high[0])) == (0x89ABCDEF, 0x01234567)
