"""Errors of a disk that say nothing about a page: pages stay, whoever meets the error first."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire_common.pages import PageKey
from quire_kvstore.tiers.aligned import BLOCK_BYTES, whole_blocks
from quire_kvstore.tiers.backend import PageJob
from quire_kvstore.tiers.disk_backend import DiskBackend
from quire_kvstore.tiers.disk_files import DiskFiles
from quire_kvstore.tiers.disk_index import DiskIndex
from tests.unit.kvstore.pages import chain, framed, put
from tests.unit.kvstore.tiers import ON_DISK_BYTES, eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from collections.abc import Callable

A = chain("a", 8)


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_two_threads_that_find_out_at_once_about_other_memory_both_get_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The second is under way, straight, while the first is refused and goes on with a copy."""
    real, big = getattr(os, name), 5000
    files = DiskFiles(tmp_path)
    pages = [memoryview(mmap.mmap(-1, 8192))[: len(framed(A, 0, big))] for _ in range(2)]

    def act(index: int) -> None:
        if name == "pwritev":
            files.write(A.key(index), pages[index], 1)
        else:
            pages[index][:] = bytes(len(pages[index]))
            assert files.read(A.key(index), pages[index], 1) == len(pages[index])

    for index, page in enumerate(pages):
        page[:] = framed(A, index, big)
        files.write(A.key(index), page, 1)
    with ThreadPoolExecutor(1) as other:
        first = [True]

        def picky(fd: int, parts: list[memoryview], offset: int) -> int:
            if first and first.pop():
                other.submit(act, 1).result(60)
            if len(parts) > 1:
                raise OSError(errno.EINVAL, "not from this memory")
            return int(real(fd, parts, offset))

        direct = files.direct
        monkeypatch.setattr(os, name, picky)
        act(0)
    assert not first and files.direct is direct
    for index, page in enumerate(pages):
        page[:] = bytes(len(page))
        assert files.read(A.key(index), page, 2) == len(page) and page == framed(A, index, big)


@pytest.mark.parametrize(
    ("code", "stays"),
    [(errno.EMFILE, True), (errno.ENFILE, True), (errno.ENOMEM, True), (errno.EINVAL, True), (errno.EIO, False)],
)
def test_a_page_goes_only_if_the_error_is_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stays: bool
) -> None:
    real, refused, file = os.preadv, [True], DiskFiles(tmp_path).path(A.key(3))

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        if refused and os.path.samestat(os.fstat(fd), status):
            raise OSError(code, os.strerror(code))
        return real(fd, parts, offset)

    with tiered(disk=tmp_path) as store:
        put(store, A)
        eventually(lambda: tier(store, "disk").figures.stored == 8)
        forget_memory(store)
        status = file.stat()
        monkeypatch.setattr(os, "preadv", preadv)
        assert found(store, A) == (3, "disk"), "a miss either way"
        disk = tier(store, "disk")
        assert (disk.figures.errors, disk.figures.corrupt) == (1, 0)
        assert (file.exists(), disk.pages) == ((True, 8) if stays else (False, 7))
        refused.clear()
        assert found(store, A)[0] == (8 if stays else 3)


@pytest.mark.parametrize(
    ("code", "stays"),
    [(errno.EMFILE, True), (errno.ENFILE, True), (errno.ENOMEM, True), (errno.EACCES, True), (errno.EIO, False)],
)
def test_a_start_removes_no_page_whose_header_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, stays: bool
) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        eventually(lambda: tier(store, "disk").figures.stored == 8)
    real, refused = os.open, [str(DiskFiles(tmp_path).path(A.key(index))) for index in (3, 4)]
    half = f"{refused[0]}.17.tmp"
    Path(half).write_bytes(b"half a page")

    def refusing(file: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(file) in (*refused, half):
            raise OSError(code, os.strerror(code))
        return real(file, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        with tiered(disk=tmp_path) as store:
            disk = tier(store, "disk")
            assert (disk.pages, disk.figures.corrupt, disk.figures.errors) == ((6, 1, 2) if stays else (6, 3, 0))
    assert [Path(file).exists() for file in (*refused, half)] == [stays, stays, False]
    assert sum("cannot be read now" in line for line in caplog.messages) == stays, "logged once for both"
    with tiered(disk=tmp_path) as store:
        assert found(store, A) == (8 if stays else 3, "disk")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_no_file_in_the_place_of_a_page_turns_direct_transfers_off(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    files, page = DiskFiles(tmp_path), memoryview(framed(A, 0))
    files.write(A.key(0), page, 1)
    direct = files.direct
    file = files.path(A.key(1))
    file.parent.mkdir(exist_ok=True)
    make(file)
    with pytest.raises(FileNotFoundError):
        files.read(A.key(1), memoryview(bytearray(len(page))), 1)
    assert files.direct is direct


def test_pipe_that_comes_into_the_place_of_a_listed_page_does_not_block_the_scan(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.write(A.key(0), memoryview(framed(A, 0)), 1)
    file = files.path(A.key(0))
    (entry,) = os.scandir(file.parent)
    file.unlink()
    os.mkfifo(file)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(files._read_header, entry)
        try:
            with pytest.raises(OSError, match="Illegal seek"):
                read.result(timeout=10)
        finally:
            os.close(os.open(file, os.O_RDWR))  # lets an open go on that waits for a writer


def test_page_whose_file_cannot_be_removed_keeps_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gone, stuck = DiskFiles.remove, list[PageKey](), A.key(0)

    def remove(files: DiskFiles, key: PageKey) -> None:
        if key == stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(files, key)

    def taken() -> int:
        return sum(whole_blocks(file.stat().st_size) for file in tmp_path.glob("*/*"))

    def write(index: int) -> bool:
        return disk.write([(PageJob(A.key(index), index + 1), memoryview(framed(A, index)))]) == 1

    disk = DiskBackend(tmp_path, 2 * ON_DISK_BYTES, "lru", retry_s=0.0)
    disk.call_back(gone.extend, lambda: None)
    disk.open()
    monkeypatch.setattr(DiskFiles, "remove", remove)
    assert write(0) and write(1)
    assert not write(2) and not disk.available and gone == [] and disk.may_have(stuck)
    disk.check_integrity()
    assert write(3) and disk.available and gone == [A.key(1)]
    disk.check_integrity()
    assert disk.used_bytes == taken() == disk.capacity_bytes
    disk.close()
    smaller = DiskBackend(tmp_path, ON_DISK_BYTES, "lru", retry_s=0.0)
    smaller.open()
    smaller.check_integrity()
    assert smaller.held_keys() == [stuck] and smaller.used_bytes == taken()
    smaller.close()


def test_page_whose_file_cannot_be_removed_may_go_beyond_the_capacity() -> None:
    """Another page takes the room while the removal goes on. The check allows only such a page to go beyond."""
    large, small, late = A.key(0), A.key(1), A.key(2)
    index = DiskIndex(2 * BLOCK_BYTES, "lru")
    assert index.begin_write(large, 2 * BLOCK_BYTES) == []
    index.finish_write(large, written=True)
    assert index.begin_write(small, 1) == [large] and index.begin_write(late, 1) == []
    index.finish_removal([large], removed=False)
    index.finish_write(small, written=False)
    index.finish_write(late, written=True)
    assert index.used_bytes == 3 * BLOCK_BYTES > index.capacity_bytes
    index.check_integrity()
    assert index.evict(1) == [large]
    index.finish_removal([large], removed=True)
    index.check_integrity()
    index.capacity_bytes = 0
    with pytest.raises(AssertionError, match="beyond the capacity"):
        index.check_integrity()


def test_a_page_that_is_too_large_does_not_say_that_the_disk_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk = DiskBackend(tmp_path, ON_DISK_BYTES, "lru", retry_s=0.0)
    disk.open()
    monkeypatch.setattr(DiskFiles, "write", refuse)
    assert disk.write([(PageJob(A.key(0), 1), memoryview(framed(A, 0)))]) == 0 and not disk.available
    large = memoryview(framed(A, 1, ON_DISK_BYTES))
    assert disk.write([(PageJob(A.key(1), 2), large)]) == 0 and not disk.available
    monkeypatch.undo()
    assert disk.write([(PageJob(A.key(0), 3), memoryview(framed(A, 0)))]) == 1 and disk.available
    disk.close()
