"""Other processes' memory, mapped once for many moves, and let go when nobody uses it."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from quire_common.kv_data.frame import DataConnectionError
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports.shared_map import SharedMapCache


def opened(ring: Ring) -> int:
    return os.open(f"/proc/self/fd/{ring.fd}", os.O_RDONLY)


def a_ring(byte: bytes) -> Ring:
    ring = Ring.create(4096, 2)
    ring.slot(1)[:] = byte * 4096
    return ring


def test_the_same_memory_is_mapped_once_and_other_memory_is_not_mistaken_for_it() -> None:
    maps, one, other = SharedMapCache(), a_ring(b"1"), a_ring(b"2")
    with maps.using(opened(one)) as first, maps.using(opened(one)) as again:
        assert first is again and maps.mapped_file == 1
        with maps.using(opened(other)) as another:
            assert another.read(4096, 1) == b"2" and first.read(4096, 1) == b"1" and maps.mapped_file == 2
    with maps.using(opened(one)) as later:
        assert later is first and later.read(8191, 1) == b"1"
    one.close()
    other.close()


def test_what_nobody_uses_is_let_go() -> None:
    maps, ring = SharedMapCache(idle_s=0.05), a_ring(b"1")
    with maps.using(opened(ring)) as held:
        threading.Event().wait(0.15)
        assert not held.closed and maps.mapped_file == 1
    deadline = time.monotonic() + 30
    while maps.mapped_file and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert held.closed
    with maps.using(opened(ring)) as new:
        assert new is not held and new.read(4096, 1) == b"1"
    ring.close()


def test_memory_is_let_go_at_once_if_no_thread_is_left_to_do_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that were copied out of it are whole: the move must not fail."""

    def no_thread(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    maps, ring = SharedMapCache(), a_ring(b"1")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", no_thread)
        with maps.using(opened(ring)) as held:
            assert held.read(4096, 1) == b"1"
    assert held.closed and not maps.mapped_file
    with maps.using(opened(ring)) as new:
        assert new is not held and new.read(4096, 1) == b"1"
    ring.close()


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(DataConnectionError), SharedMapCache().using(-1):
        raise AssertionError("it cannot be used")


def test_an_empty_file_is_refused() -> None:
    fd = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(DataConnectionError, match="empty"), SharedMapCache().using(fd):
        raise AssertionError("it cannot be used")
