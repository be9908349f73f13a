"""Tensors copied by threads through small buffers: the same numbers, types changed, the same digests, errors told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from quire_common.errors import ConfigError
from quire_worker.weights.safetensors_file import SafetensorsFile
from quire_worker.weights.tensor_copier import TensorCopy, copy_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TENSORS = {
    "large": torch.arange(3000, dtype=torch.float32).reshape(30, 100),
    "half": torch.linspace(-4, 4, 777).half(),
    "brain": torch.linspace(-9, 9, 512).bfloat16().reshape(2, 256),
    "one": torch.tensor([7.5]),
    "none": torch.zeros(0, 4),
}


def make(folder: Path, dtype: torch.dtype) -> list[TensorCopy]:
    path = folder / "model.safetensors"
    save_file(TENSORS, path)
    with SafetensorsFile(path) as file:
        return [
            TensorCopy(path, entry, torch.full(entry.shape, float("nan"), dtype=dtype, device=DEVICE))
            for entry in file.entries.values()
        ]


@pytest.mark.parametrize("threads", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_in_the_wanted_type(tmp_path: Path, threads: int, dtype: torch.dtype) -> None:
    copies, seen = make(tmp_path, dtype), list[int]()
    digests = copy_tensors(copies, seen.append, threads=threads, stage_bytes=256)
    total = sum(each.entry.num_bytes for each in copies)
    assert seen == sorted(seen) and seen[-1] == total and len(seen) > len(copies), "progress comes within tensors"
    data = copies[0].path.read_bytes()
    for each in copies:
        entry = each.entry
        assert torch.equal(each.target.cpu(), TENSORS[entry.name].to(dtype)), entry.name
        whole = f"{entry.name}/{entry.dtype}/{entry.shape}/".encode() + data[entry.begin : entry.end]
        assert digests[entry.name] == xxhash.xxh3_128(whole).digest()


def test_nothing_to_copy() -> None:
    assert copy_tensors([], lambda _: None) == {}


def test_a_file_that_shrinks_ends_all_threads_with_its_name(tmp_path: Path) -> None:
    copies = make(tmp_path, torch.float32)
    path = copies[0].path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 600)
    with pytest.raises(ConfigError, match=r"model\.safetensors became shorter") as error:
        copy_tensors(copies, lambda _: None, threads=4, stage_bytes=128)
    assert error.value.code == "TRUNCATED_SAFETENSORS"
