"""Damaged headers by the thousand: each is read or refused with a typed error, in memory that the file bounds."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from quire_common.errors import QuireError
from quire_common.gguf import TextArray, read_header
from tests.damaged_headers import check_damaged_headers
from tests.gguf.test_header import GOOD
from tests.tiers import deep_after

_INTERESTING = (0, 1, 2, 7, 8, 9, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)


def damaged(content: bytes, choose: random.Random) -> bytes:
    """The file with one to four changes: bytes, numbers, cuts, repetitions."""
    changed = bytearray(content)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(max(1, len(changed)))
        match choose.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            case 1:
                changed[at : at + 8] = struct.pack("<Q", choose.choice(_INTERESTING))
            case 2:
                changed[at : at + 4] = struct.pack("<I", choose.choice(_INTERESTING) & 0xFFFFFFFF)
            case 3:
                del changed[at : at + choose.randint(1, 64)]
            case _:
                changed[at:at] = changed[at : at + choose.randint(1, 64)]
    return bytes(changed)


def read_all(path: Path) -> bool:
    """Whether the file was read, all of its texts too."""
    try:
        found = read_header(path)
        for key, value in found.metadata.values.items():
            if isinstance(value, TextArray):
                found.metadata.texts(key)
    except QuireError as error:
        assert error.code and error.fix and str(path) in error.message
        return False
    size = path.stat().st_size
    assert all(place.begin > 0 and place.begin + place.num_bytes <= size for place in found.tensors.values())
    return True


@pytest.mark.parametrize("seed", deep_after(1, range(50)))
def test_damaged_headers(seed: int, tmp_path: Path) -> None:
    choose, path = random.Random(seed), tmp_path / "damaged.gguf"
    content, header = bytes(GOOD), len(GOOD.header())
    check_damaged_headers(path, lambda: damaged(content[:header], choose) + content[header:], read_all)
