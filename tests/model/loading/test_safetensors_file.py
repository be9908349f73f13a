from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire_common.errors import ConfigError, Unsupported
from quire_worker.weights.safetensors_file import SafetensorsFile

GOOD_HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def raw(header: object, data_bytes: int = 32) -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def changed(name: str, **fields: object) -> bytes:
    return raw(GOOD_HEADER | {name: GOOD_HEADER[name] | fields})


def test_tensors_are_read_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {
        "x": torch.randn(3, 5),
        "y": torch.randn(7).bfloat16(),
        "z": torch.randn(2, 2).half(),
        "odd": torch.arange(3, dtype=torch.uint8),
    }
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with SafetensorsFile(path) as file:
        assert set(file.entries) == set(tensors)
        for name in "xyz":
            found = file.tensor(file.entries[name])
            assert found.dtype == tensors[name].dtype and torch.equal(found, tensors[name])
        with pytest.raises(Unsupported) as error:
            file.tensor(file.entries["odd"])
    assert error.value.code == "UNSUPPORTED_WEIGHT_DTYPE"


def test_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    save_file({"none": torch.empty(0, 5), "some": torch.ones(2)}, path)
    with SafetensorsFile(path) as file:
        found = file.tensor(file.entries["none"])
    assert (found.shape, found.dtype) == ((0, 5), torch.float32)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "TRUNCATED_SAFETENSORS"),
    "seven bytes": (b"1234567", "TRUNCATED_SAFETENSORS"),
    "header cut": (raw(GOOD_HEADER)[:40], "TRUNCATED_SAFETENSORS"),
    "data cut": (raw(GOOD_HEADER)[:-1], "TRUNCATED_SAFETENSORS"),
    "no data": (raw(GOOD_HEADER, 0), "TRUNCATED_SAFETENSORS"),
    "bytes behind the data": (raw(GOOD_HEADER, 33), "CORRUPT_SAFETENSORS"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "CORRUPT_SAFETENSORS"),
    "not JSON": (raw(b"{nonsense"), "CORRUPT_SAFETENSORS"),
    "not UTF-8": (raw(b'{"\xff\xfe": 1}'), "CORRUPT_SAFETENSORS"),
    "nested too deeply": (raw(b"[" * 100_000), "CORRUPT_SAFETENSORS"),
    "a list": (raw([1, 2]), "CORRUPT_SAFETENSORS"),
    "entry is a number": (raw({"a": 5}), "CORRUPT_SAFETENSORS"),
    "unknown dtype": (changed("a", dtype="F33"), "CORRUPT_SAFETENSORS"),
    "negative size": (changed("a", shape=[-2, -3]), "CORRUPT_SAFETENSORS"),
    "size is text": (changed("a", shape=["2", 3]), "CORRUPT_SAFETENSORS"),
    "three offsets": (changed("a", data_offsets=[0, 12, 24]), "CORRUPT_SAFETENSORS"),
    "shape and bytes disagree": (changed("a", shape=[2, 4]), "CORRUPT_SAFETENSORS"),
    "empty and too large": (
        raw({"a": {"dtype": "F32", "shape": [0, 1 << 62, 4], "data_offsets": [0, 0]}}, 0),
        "CORRUPT_SAFETENSORS",
    ),
    "overlap": (changed("b", data_offsets=[20, 28]), "CORRUPT_SAFETENSORS"),
    "gap": (changed("b", data_offsets=[28, 36]), "CORRUPT_SAFETENSORS"),
    "offset beyond the file": (changed("b", data_offsets=[1 << 50, (1 << 50) + 8]), "CORRUPT_SAFETENSORS"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    content, code = DAMAGE[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        SafetensorsFile(path)
    assert error.value.code == code
    assert "bad.safetensors" in error.value.message and error.value.fix


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["absent", "a folder"])
def test_what_cannot_be_opened_is_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "gone.safetensors"
    make(path)
    with pytest.raises(ConfigError) as error:
        SafetensorsFile(path)
    assert error.value.code == "UNREADABLE_FILE"
