"""The disk tier: pages survive memory and process; nothing that happens to the disk is more than a miss."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from quire_common.telemetry.metrics import registry
from quire_kvstore.tiers.disk_files import DiskFiles
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, chain, framed, length, part, put
from tests.unit.kvstore.tiers import ON_DISK_BYTES, eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quire_kvstore.page_store import PageStore

A, B, C = chain("a", 8), chain("b", 8), chain("c", 8)


def written(store: PageStore, count: int) -> None:
    eventually(lambda: tier(store, "disk").figures.stored == count)
    store.flush(30)


def path(root: Path, index: int) -> Path:
    return DiskFiles(root).path(A.key(index))


def test_pages_that_left_memory_come_back_from_the_disk(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        assert put(store, A) == (8, 0)
        written(store, 8)
        assert found(store, A) == (8, "ram")
        forget_memory(store)
        assert store.stats().pages == 0 and length(store, A) == 8
        assert found(store, A) == (8, "disk")
        assert found(store, A) == (8, "ram"), "they are in memory again"
        disk = tier(store, "disk")
        assert (disk.pages, disk.used_bytes, disk.capacity_bytes) == (8, 8 * ON_DISK_BYTES, 64 * ON_DISK_BYTES)
        assert (disk.figures.hits, disk.figures.misses, disk.figures.corrupt) == (8, 0, 0)
        assert (disk.figures.bytes_written, disk.figures.bytes_read) == (8 * FRAMED_BYTES, 8 * FRAMED_BYTES)
        ram = tier(store, "ram").figures
        assert (ram.hits, ram.misses) == (16, 8)
        for operation in ("read", "write"):
            labels = {"medium": "disk", "operation": operation}
            assert registry.get_sample_value("quire_kvstore_tier_operation_seconds_count", labels)
        assert put(store, A) == (0, 0), "nothing is wanted"


def test_what_is_on_the_disk_alone_is_not_wanted_again(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, part(A, 0, 5))
        written(store, 5)
        forget_memory(store)
        assert store.begin_put(A, BODY_BYTES, 0)[0] == [5, 6, 7]


def test_a_restart_finds_its_pages_and_an_order(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
        put(store, B)
        written(store, 16)
        forget_memory(store)
        assert found(store, A) == (8, "disk"), "A is the younger one now"
    with tiered(disk=tmp_path, disk_pages=12) as store:
        assert tier(store, "disk").pages == 12
        assert tier(store, "disk").figures.evictions == 4
        assert (length(store, A), length(store, B)) == (8, 4), "what is too much goes: of B, and from its tail"
        assert found(store, A) == (8, "disk")
        assert found(store, B) == (4, "disk")


def test_the_least_recently_used_chain_leaves_the_disk_first_and_from_its_tail(tmp_path: Path) -> None:
    with tiered(pages=16, disk=tmp_path, disk_pages=12) as store:
        put(store, part(A, 0, 6))
        written(store, 6)
        put(store, part(B, 0, 6))
        written(store, 12)
        assert found(store, part(A, 0, 6)) == (6, "ram"), "a hit in memory counts for the disk too"
        put(store, part(C, 0, 2))
        written(store, 14)
        forget_memory(store)
        assert [length(store, run) for run in (A, B, C)] == [6, 4, 2]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_disk_stays_within_its_capacity(tmp_path: Path, policy: str) -> None:
    with tiered(pages=8, disk=tmp_path, disk_pages=10, disk_policy=policy, ram_policy=policy) as store:
        for number in range(12):
            put(store, chain(f"run {number}", 4))
            store.flush(30)
        files = [name for _, _, names in os.walk(tmp_path) for name in names]
        assert len(files) == 10 and all(name.endswith(".page") for name in files)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.page")) == 10 * ON_DISK_BYTES


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("arc", 3)])
def test_what_was_found_stays_on_the_disk_through_a_scan_with_arc(tmp_path: Path, policy: str, left: int) -> None:
    with tiered(disk=tmp_path, disk_pages=6, disk_policy=policy) as store:
        put(store, part(A, 0, 3))
        written(store, 3)
        assert found(store, part(A, 0, 3)) == (3, "ram")
        for number in range(6):
            put(store, chain(f"said once {number}", 2))
            written(store, 5 + 2 * number)
        forget_memory(store)
        assert length(store, A) == left, "to be written is no second use"


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def pipe_in_its_place(file: Path) -> None:
    """A pipe, which nobody writes to."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a flipped byte of the body", lambda file: flip(file, 500)),
        ("a flipped byte of the header", lambda file: flip(file, 70)),
        ("bad magic", lambda file: flip(file, 0)),
        ("a length that lies", lambda file: flip(file, 96)),
        ("truncated", lambda file: os.truncate(file, 700)),
        ("empty", lambda file: os.truncate(file, 0)),
        ("another page", lambda file: file.write_bytes(framed(B, 0).ljust(ON_DISK_BYTES, b"\0"))),
        ("another namespace", lambda file: file.write_bytes(framed(chain("a", 8, bytes(32)), 3).ljust(4096, b"\0"))),
        ("gone", lambda file: file.unlink()),
        ("a folder", lambda file: (file.unlink(), file.mkdir())),
        ("a link out of the folder", lambda file: (file.unlink(), file.symlink_to("/etc/passwd"))),
        ("a pipe", pipe_in_its_place),
    ],
)
def test_damage_is_a_miss_once_and_the_page_goes(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
        forget_memory(store)
        damage(path(tmp_path, 3))
        assert found(store, A) == (3, "disk")
        assert length(store, A) == 3 and tier(store, "disk").pages == 7
        unreadable = name in ("gone", "a folder", "a link out of the folder", "a pipe")
        assert tier(store, "disk").figures.corrupt == (0 if unreadable else 1)
        if name == "a folder":
            path(tmp_path, 3).rmdir()  # none of ours: we do not remove it, and cannot write there
        assert put(store, A) == (1, 0), "it is wanted again"
        written(store, 9)
        forget_memory(store)
        assert found(store, A) == (8, "disk")


def test_a_start_removes_what_is_broken_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
    os.truncate(path(tmp_path, 7), 900)
    flip(path(tmp_path, 6), 0)
    path(tmp_path, 5).write_bytes(framed(B, 0).ljust(ON_DISK_BYTES, b"\0"))
    flip(path(tmp_path, 4), 600)  # the header is right: found out when it is read
    half = path(tmp_path, 0).with_suffix(".page.17.tmp")
    half.write_bytes(b"half a page")
    foreign = [tmp_path / "notes.txt", path(tmp_path, 0).with_name("letter.page"), tmp_path / "folder" / "x"]
    foreign[2].parent.mkdir()
    for file in foreign:
        file.write_text("not a page")
    with tiered(disk=tmp_path) as store:
        disk = tier(store, "disk")
        assert (disk.pages, disk.figures.corrupt, disk.figures.foreign) == (5, 4, 3)
        assert found(store, A) == (4, "disk")
        assert tier(store, "disk").figures.corrupt == 5
        assert not half.exists() and all(file.read_text() == "not a page" for file in foreign)


def test_a_copy_of_a_page_in_another_folder_is_removed_and_the_page_stays(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
    file = path(tmp_path, 0)
    copy = tmp_path / ("00" if file.parent.name != "00" else "01") / file.name
    copy.parent.mkdir()
    shutil.copy2(file, copy)
    with tiered(disk=tmp_path) as store:
        disk = tier(store, "disk")
        assert (disk.pages, disk.figures.corrupt, disk.figures.foreign) == (8, 1, 0)
        assert file.is_file() and not copy.exists()
        assert found(store, A) == (8, "disk")


class BrokenWrites:
    """os.pwritev that refuses on command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self.count = 0
        real = os.pwritev

        def pwritev(fd: int, data: list[memoryview], offset: int) -> int:
            self.count += 1
            if self.code:
                raise OSError(self.code, os.strerror(self.code))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_read_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    disk = BrokenWrites(monkeypatch)
    with tiered(pages=32, disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
        disk.code = code
        assert put(store, B) == (8, 0), "nobody who puts hears of it"
        eventually(lambda: tier(store, "disk").figures.dropped == 8)
        stats = tier(store, "disk")
        assert stats.figures.errors >= 1 and not stats.available
        kept = 4 if code in (errno.ENOSPC, errno.EDQUOT) else 8
        assert stats.pages <= kept, "on a full disk our oldest pages make room"
        assert not list(tmp_path.rglob("*.tmp"))
        assert found(store, B) == (8, "ram")
        forget_memory(store)
        assert length(store, B) == 0
        pages = found(store, A)
        assert pages == ((8, "disk") if kept == 8 else pages) and pages[0] <= kept
        disk.code = 0
        number = 0

        def writes_again() -> bool:
            nonlocal number
            number += 1
            put(store, chain(f"again {number}", 1))
            store.flush(30)
            return tier(store, "disk").available

        eventually(writes_again)


def test_a_filesystem_that_knows_no_direct_writes_is_written_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(file: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(file, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
        forget_memory(store)
        assert found(store, A) == (8, "disk")
        assert tier(store, "disk").figures.errors == 0


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_wants_other_memory_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """As one that knows no direct writes at all, but let us open the file so."""
    calls = {"pwritev": os.pwritev, "preadv": os.preadv}

    def picky(name: str) -> Callable[[int, list[memoryview], int], int]:
        def call(fd: int, parts: list[memoryview], offset: int) -> int:
            opened_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            if len(parts) > 1 or (opened_direct and not direct):
                raise OSError(errno.EINVAL, "not from this memory")
            return calls[name](fd, parts, offset)

        return call

    big = 5000
    for name in calls:
        monkeypatch.setattr(os, name, picky(name))
    files = DiskFiles(tmp_path)
    page = memoryview(framed(A, 0, big))
    aligned = memoryview(mmap.mmap(-1, 8192))[: len(page)]
    aligned[:] = page
    files.write(A.key(0), aligned, 1)
    aligned[:] = bytes(len(aligned))
    assert files.read(A.key(0), aligned, 2) == len(page) and aligned == page
    assert files.direct is direct


def test_a_folder_that_cannot_be_had_is_done_without_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file is in the way")
    with tiered(disk=tmp_path / "taken" / "pages") as store:
        assert not tier(store, "disk").available
        assert put(store, A) == (8, 0) and found(store, A) == (8, "ram")
        (tmp_path / "taken").unlink()
        eventually(lambda: tier(store, "disk").available)
        put(store, B)
        written(store, 8)


def test_who_watches_hears_of_pages_that_were_found_late(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        written(store, 8)
    claimed = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(claimed, fcntl.LOCK_EX)
    with tiered(disk=tmp_path) as store:
        watcher = store.open_watch()
        assert not store.snapshot(watcher)[1]["disk"]
        os.close(claimed)
        eventually(lambda: tier(store, "disk").available)
        put(store, B)
        assert watcher.wait_for_changes() is None, "a snapshot is needed"
        assert set(store.snapshot(watcher)[1]["disk"]) == set(A.keys())


def test_two_stores_do_not_share_a_folder(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as first:
        put(first, A)
        written(first, 8)
        with tiered(disk=tmp_path) as second:
            assert not tier(second, "disk").available and length(second, A) == 0
            assert found(first, A) == (8, "ram")


@pytest.mark.parametrize(
    ("mode", "stored"), [("write-through", [8, 8, 8]), ("selective", [0, 0, 8]), ("off", [0, 0, 0])]
)
def test_what_is_written_depends_on_the_policy(tmp_path: Path, mode: str, stored: list[int]) -> None:
    with tiered(disk=tmp_path, disk_write=mode) as store:
        put(store, A)
        for expected in stored:
            store.flush(30)
            assert tier(store, "disk").figures.stored == expected
            assert found(store, A) == (8, "ram")


def test_a_full_queue_drops_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = os.pwritev

    def slow(fd: int, data: list[memoryview], offset: int) -> int:
        assert go.wait(60)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    with tiered(pages=32, disk=tmp_path, write_queue=4) as store:
        for number in range(4):
            assert put(store, chain(f"run {number}", 8)) == (8, 0)
        assert tier(store, "disk").figures.dropped >= 20
        assert found(store, chain("run 3", 8)) == (8, "ram")
        go.set()
        store.flush(30)
        assert tier(store, "disk").figures.dropped + tier(store, "disk").figures.stored == 32


def test_room_that_is_to_be_left_to_others_is_left(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with tiered(disk=tmp_path, disk_keep_free_bytes=2 * free) as store:
        assert put(store, A) == (8, 0) and found(store, A) == (8, "ram")
        eventually(lambda: tier(store, "disk").figures.dropped == 8)
        assert not tier(store, "disk").available and not list(tmp_path.rglob("*.page"))


def test_a_folder_that_is_deleted_meanwhile_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with tiered(pages=32, disk=folder) as store:
        put(store, A)
        written(store, 8)
        shutil.rmtree(folder)
        forget_memory(store)
        for index in range(8):
            assert found(store, part(A, index, index + 1)) == (0, ""), "what is gone is a miss"
        assert put(store, A) == (8, 0), "and what was missed is wanted again"
        written(store, 16)
        assert folder.stat().st_mode & 0o077 == 0
        forget_memory(store)
        assert found(store, A) == (8, "disk")


def test_no_room_at_all_is_no_disk_tier(tmp_path: Path) -> None:
    with tiered(disk=tmp_path / "pages", disk_bytes=0) as store:
        assert [stats.name for stats in store.stats().tiers] == ["ram"]
    assert not (tmp_path / "pages").exists()
