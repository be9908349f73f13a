"""`quire plan` with GGUF files, which the worker's reader reads in another process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.capacity.model_sizes import read_sizes
from quire.errors import FailedPrecondition, InvalidArgument
from tests.gguf.raw import F32, TEXT, U32, RawFile, Tensor, pair
from tests.unit.quire_package.test_plan import CONFIG


def gguf_file(path: Path, **changes: int) -> Path:
    """A GGUF file of two layers with 300 tokens, an output head of its own, and sizes like those of CONFIG."""
    sizes = {"context_length": 4096, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128,
             "attention.head_count": 4, "attention.head_count_kv": 2} | changes  # fmt: skip
    pairs = [pair("general.architecture", TEXT, "llama"), pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)]
    pairs += [pair(f"llama.{name}", U32, value) for name, value in sizes.items()]
    tensors = [Tensor(name, (64, 300), num_bytes=64 * 300 * 4) for name in ("token_embd.weight", "output.weight")]
    path.write_bytes(bytes(RawFile(pairs, tensors)))
    return path


def test_gguf_file_has_the_sizes_of_the_folder_from_which_it_was_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    from_folder = read_sizes(tmp_path)
    for name in ("Llama-3.1-8B.GGUF", "blob"):
        assert read_sizes(gguf_file(tmp_path / name)) == replace(from_folder, name=name.removesuffix(".GGUF"))


def test_gguf_file_that_the_worker_refuses_is_refused_with_the_workers_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expert_count") as raised:
        read_sizes(gguf_file(tmp_path / "model.gguf", expert_count=8))
    assert raised.value.code.startswith("UNSUPPORTED") and raised.value.fix
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\xff")
    with pytest.raises(InvalidArgument, match="cut short"):
        read_sizes(path)


def test_gguf_file_without_the_workers_package_is_an_error_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.capacity.gguf_fields._COMMAND", ("-P", "-m", "quire_worker_that_is_not_here"))
    with pytest.raises(FailedPrecondition, match="quire_worker_that_is_not_here") as raised:
        read_sizes(gguf_file(tmp_path / "model.gguf"))
    assert "Install quire-worker" in raised.value.fix
