"""The arena against a plain model, at its edges, and against those who have its descriptor."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random

import pytest

from quire_kvstore.arena import HEAD_BYTES, SEALS, Arena
from quire_kvstore.extent_allocator import ExtentAllocator
from quire_kvstore.slab_allocator import SPAN_BYTES, SlabAllocator


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_overlaps_and_loses_nothing(seed: int) -> None:
    rng, arena = random.Random(seed), Arena(64 * 1024)
    held: dict[int, bytes] = {}
    generations: dict[int, int] = {}
    seen: set[int] = set()
    for _ in range(2000):
        if held and rng.random() < 0.48:
            start = rng.choice(list(held))
            with arena.view(start, len(held[start])) as view:
                assert bytes(view) == held.pop(start), "nobody else wrote here"
            assert arena.generation(start) == generations.pop(start)
            arena.free(start)
        else:
            data = rng.randbytes(rng.choice((1, 64, 65, 1000, 4096)))
            offset = arena.allocate(len(data))
            if offset is not None:
                assert arena.generation(offset) not in seen, "each page has its own"
                held[offset] = data
                generations[offset] = arena.generation(offset)
                seen.add(generations[offset])
                with arena.view(offset, len(data)) as view:
                    view[:] = data
        arena.check_integrity()
    for start in held:
        arena.free(start)
    assert arena.used_bytes == 0
    assert arena.allocate(64 * 1024 - HEAD_BYTES) == HEAD_BYTES, "all fragments have merged"
    arena.close()


def test_it_refuses_what_does_not_fit_and_fills_to_the_last_byte() -> None:
    arena = Arena(4096)
    assert arena.allocate(3585) is None
    assert [arena.allocate(512) for _ in range(5)] == [512, 1536, 2560, 3584, None]
    arena.free(1536)
    assert arena.allocate(513) is None, "rounded up to 1024, and only 512 are free"
    assert arena.allocate(1) == 1536
    arena.check_integrity()
    arena.close()


def test_freeing_what_is_not_held_is_a_bug_that_shows() -> None:
    arena = Arena(256)
    with pytest.raises(KeyError):
        arena.free(64)
    arena.close()


def test_a_page_that_went_is_seen_to_have_gone() -> None:
    arena = Arena(4096)
    offset = arena.allocate(64)
    assert offset is not None
    generation = arena.generation(offset)
    assert generation
    arena.free(offset)
    assert arena.generation(offset) == 0
    assert arena.allocate(64) == offset
    assert arena.generation(offset) not in (0, generation)
    arena.close()


def test_memory_is_taken_as_it_is_used_or_at_once() -> None:
    arena = Arena(8 << 20)
    offset = arena.allocate(5000)
    assert offset is not None
    arena.view(offset, 4)[:] = b"page"

    fd = arena.fd
    assert fd is not None

    def resident() -> int:
        return os.fstat(fd).st_blocks * 512

    assert resident() < 1 << 20
    arena.populate(0, 4 << 20)
    assert 4 << 20 <= resident() < 5 << 20
    arena.populate(4 << 20, 1 << 30)
    assert resident() == 8 << 20 and bytes(arena.view(offset, 4)) == b"page"
    arena.close()


def test_who_has_the_descriptor_can_read_and_nothing_else() -> None:
    arena = Arena(1 << 16)
    offset = arena.allocate(64)
    assert offset is not None and arena.fd is not None
    with arena.view(offset, 4) as view:
        view[:] = b"page"
    reader = os.dup(arena.fd)
    try:
        assert os.pread(reader, 4, offset) == b"page"
        with mmap.mmap(reader, 1 << 16, prot=mmap.PROT_READ) as mapped:
            assert mapped[offset : offset + 4] == b"page"
        with pytest.raises(OSError):
            mmap.mmap(reader, 1 << 16)
        with pytest.raises(OSError):
            os.pwrite(reader, b"x", offset)
        with pytest.raises(OSError):
            os.ftruncate(reader, 0)
        assert fcntl.fcntl(reader, fcntl.F_GET_SEALS) == SEALS
        # Opened once more, as its owner may: that descriptor can write, the seals do not let it.
        os.fchmod(reader, 0o600)
        again = os.open(f"/proc/self/fd/{reader}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", offset)
            with pytest.raises(PermissionError):
                mmap.mmap(again, 1 << 16)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 1)
        finally:
            os.close(again)
        with arena.view(offset, 4) as view:
            view[:] = b"more"
        assert os.pread(reader, 4, offset) == b"more"
    finally:
        os.close(reader)
        arena.close()


def test_where_the_kernel_cannot_seal_nobody_gets_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "no such seal")

    monkeypatch.setattr("quire_kvstore.arena.fcntl.fcntl", refuse)
    arena = Arena(4096)
    assert arena.fd is None
    offset = arena.allocate(64)
    assert offset is not None
    with arena.view(offset, 4) as view:
        view[:] = b"page"
        assert bytes(view) == b"page"
    arena.close()


def test_small_pages_share_spans_and_leave_room_for_large_ones() -> None:
    slabs = SlabAllocator(4 * SPAN_BYTES)
    small = [slabs.allocate(SPAN_BYTES // 16) for _ in range(17)]
    assert all(slab is not None and slab < 2 * SPAN_BYTES for slab in small), "in two spans"
    large = [slabs.allocate(SPAN_BYTES) for _ in range(3)]
    assert large == [2 * SPAN_BYTES, 3 * SPAN_BYTES, None]
    slabs.check_integrity()
    slabs.free(small[16])  # type: ignore[arg-type]  # all were there
    assert slabs.allocate(SPAN_BYTES) == SPAN_BYTES, "an empty span is anybody's"
    for slab in small[:16]:
        slabs.free(slab)  # type: ignore[arg-type]  # as above
    slabs.check_integrity()
    assert slabs.allocate(SPAN_BYTES // 2) == 0


def test_a_span_takes_what_room_there_is() -> None:
    extents = ExtentAllocator(1000)
    assert extents.allocate(300, 10) == (0, 3)
    assert extents.allocate(300, 10) is None
    assert extents.allocate(50, 10) == (900, 2)
    extents.check_integrity()
