"""Weight files are read into the page cache while the worker imports torch and loads the model."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire_worker import loading, model_source
from quire_worker.config import WorkerConfig
from quire_worker.weights import read_ahead as reader
from quire_worker.weights.read_ahead import PIECE_BYTES, is_cached, read_ahead

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
_MIDDLE = PIECE_BYTES // 2


class Reads:
    """Stands for os.preadv and `is_cached` in one thread. `seen` has the name of the file, the offset and the number of
    bytes of each read; `asked` has the name and the offset of each question about the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cached: bool = False) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.asked: list[tuple[str, int]] = []
        self._cached = cached
        self._read = os.preadv
        monkeypatch.setattr(reader, "_THREADS", 1)
        monkeypatch.setattr(reader, "is_cached", self._is_cached)
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _is_cached(self, file: int, at: int) -> bool:
        self.asked.append((_name(file), at))
        return self._cached

    def _preadv(self, file: int, buffers: list[bytearray], at: int) -> int:
        count = self._read(file, buffers, at)
        self.seen.append((_name(file), at, count))
        return count

    def of(self, model: Path, pieces: int) -> list[tuple[str, int, int]]:
        """Return what is read of a model with so many pieces."""
        with read_ahead(model):
            until = time.monotonic() + 10
            while len(self.asked) < pieces and time.monotonic() < until:
                time.sleep(0.002)
        assert len(self.asked) == pieces
        return self.seen


def _name(file: int) -> str:
    return Path(f"/proc/self/fd/{file}").readlink().name


def _sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def _readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def test_the_weights_of_a_folder_are_read_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies under another name, and other files, are not read."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for name in (second, first, "consolidated.safetensors"):
        _sparse(tmp_path / name, PIECE_BYTES + 3)
    _sparse(tmp_path / "tokenizer.json", 100)
    assert Reads(monkeypatch).of(tmp_path, 4) == [
        (first, 0, PIECE_BYTES),
        (first, PIECE_BYTES, 3),
        (second, 0, PIECE_BYTES),
        (second, PIECE_BYTES, 3),
    ]


def test_a_gguf_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Reads(monkeypatch).of(_sparse(tmp_path / "some.gguf", 10), 1) == [("some.gguf", 0, 10)]


def test_pieces_in_the_page_cache_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of a piece decides: the system may have read its begin with the piece before."""
    reads = Reads(monkeypatch, cached=True)
    assert reads.of(_sparse(tmp_path / "some.gguf", 2 * PIECE_BYTES), 2) == []
    assert reads.asked == [("some.gguf", _MIDDLE), ("some.gguf", PIECE_BYTES + _MIDDLE)]


def test_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_BYTES", 3 * PIECE_BYTES)
    reads = Reads(monkeypatch, cached=True)
    reads.of(_sparse(tmp_path / "some.gguf", 1 << 40), 3)
    assert len(reads.asked) == 3


def test_bytes_that_were_just_written_are_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(bytes(100))
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except (OSError, AttributeError):
            pytest.skip("this system does not say what is in its page cache")
        assert is_cached(file.fileno(), 99)
        assert not is_cached(file.fileno(), 100)


def test_a_system_that_does_not_say_what_is_cached_has_nothing_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(bytes(100))
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    with path.open("rb") as file:
        assert not is_cached(file.fileno(), 0)


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_weights_is_no_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with read_ahead(tmp_path / name):
        assert not _readers()


def test_what_cannot_be_read_is_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to nothing cannot be examined, and a folder cannot be opened."""
    (tmp_path / "model-0.safetensors").mkdir()
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "nowhere")
    _sparse(tmp_path / "model-2.safetensors", 5)
    assert Reads(monkeypatch).of(tmp_path, 1) == [("model-2.safetensors", 0, 5)]


def test_a_worker_without_room_for_threads_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with read_ahead(_sparse(tmp_path / "some.gguf", 10)):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_reading_ends_with_the_context(tmp_path: Path, fails: bool) -> None:
    """8 GiB would take seconds."""
    model = _sparse(tmp_path / "some.gguf", 1 << 40)
    with contextlib.suppress(ImportError), read_ahead(model):
        assert _readers()
        if fails:
            raise ImportError("torch")
    assert not _readers()


def test_context_waits_once_for_all_reads_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, hanging = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> int:
        hanging.release()
        released.wait(60)
        return 0

    monkeypatch.setattr(reader, "usable_cores", lambda: 9)
    monkeypatch.setattr(reader, "is_cached", lambda *_: False)
    monkeypatch.setattr(reader, "_LAST_READS_S", 0.2)
    monkeypatch.setattr(os, "preadv", hang)
    joined, readers = list[float](), list[threading.Thread]()
    join = threading.Thread.join

    def record(thread: threading.Thread, timeout: float) -> None:
        joined.append(timeout)
        join(thread, timeout)

    try:
        with read_ahead(_sparse(tmp_path / "some.gguf", 8 * PIECE_BYTES)):
            assert all(hanging.acquire(timeout=10) for _ in range(8))
            readers = _readers()
            monkeypatch.setattr(threading.Thread, "join", record)
        assert len(readers) == len(joined) == 8 and sum(joined) < 0.4, "the first thread takes the whole time"
    finally:
        monkeypatch.undo()
        released.set()
        for thread in readers:
            thread.join(10)


@pytest.mark.parametrize(("load_format", "expected"), [("auto", [DEMO]), ("dummy", [])])
def test_a_worker_reads_ahead_unless_its_weights_are_random(
    monkeypatch: pytest.MonkeyPatch, load_format: str, expected: list[Path]
) -> None:
    """It reads until the model is loaded."""
    seen, reading = list[Path](), list[Path]()

    @contextlib.contextmanager
    def record(model: Path) -> Iterator[None]:
        seen.append(model)
        reading.append(model)
        try:
            yield
        finally:
            reading.clear()

    def stop(*_: object) -> None:
        """Called when the weights are to be loaded."""
        assert reading == expected
        raise InterruptedError

    monkeypatch.setattr(model_source, "read_ahead", record)
    monkeypatch.setattr(loading, "load_model", stop)
    with pytest.raises(InterruptedError):
        threads = torch.get_num_threads()  # which stay as they are
        config = WorkerConfig(model=str(DEMO), device="cpu", load_format=load_format, torch_threads=threads)
        model_source.load_configured(config, lambda *_: None)
    assert (seen, reading) == (expected, [])
