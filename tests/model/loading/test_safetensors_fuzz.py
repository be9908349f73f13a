"""Damaged safetensors headers by the thousand: each is read or refused with a typed error, in bounded memory."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from quire_common.errors import ConfigError, QuireError
from quire_worker.weights.safetensors_file import SafetensorsFile
from tests.damaged_headers import check_damaged_headers
from tests.model.loading.test_safetensors_file import GOOD_HEADER, raw
from tests.tiers import deep_after

_PIECES = (
    *(b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b"9" * 30, b'"F32"', b'"I4"'),
    *(b",", b":", b"[", b"]", b"{", b"}", b'"', b"\xff", b"\x00", b'"shape"', b'"dtype"', b'"data_offsets"', b" "),
)


def damaged(content: bytes, choose: random.Random) -> bytes:
    """One to four changes: bytes, pieces of JSON, cuts, repetitions, another length of the header."""
    changed = bytearray(content)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(max(1, len(changed)))
        match choose.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            case 1:
                changed[at : at + choose.randint(0, 8)] = choose.choice(_PIECES)
            case 2:
                del changed[at : at + choose.randint(1, 32)]
            case 3:
                changed[at:at] = changed[at : at + choose.randint(1, 32)]
            case 4:
                # The length fits again, so that JSON is what is wrong.
                changed[:8] = struct.pack("<Q", max(0, len(changed) - 40))
            case _:
                changed[:8] = struct.pack("<Q", choose.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1)))
    return bytes(changed)


def read_all(path: Path) -> bool:
    """Whether the header was read."""
    try:
        with SafetensorsFile(path) as file:
            for entry in file.entries.values():
                entry.name.encode()
                file.tensor(entry)
    except QuireError as error:
        assert error.code and error.fix
        error.message.encode()
        return False
    return True


@pytest.mark.parametrize("seed", deep_after(1, range(50)))
def test_damaged_headers(seed: int, tmp_path: Path) -> None:
    choose, path = random.Random(seed), tmp_path / "damaged.safetensors"
    content = raw(GOOD_HEADER)
    path.write_bytes(content)
    assert read_all(path)
    check_damaged_headers(path, lambda: damaged(content, choose), read_all)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [10**18] * 100_000, "data_offsets": [0, 32]}},
        {"\ud800": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}},
    ],
    ids=["a hundred thousand axes", "a name that is no text"],
)
def test_a_costly_or_unprintable_entry_is_refused(header: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw(json.loads(json.dumps(header))))
    with pytest.raises(ConfigError, match="CORRUPT_SAFETENSORS") as error:
        SafetensorsFile(path)
    assert len(error.value.message) < 500 and error.value.message.encode()
