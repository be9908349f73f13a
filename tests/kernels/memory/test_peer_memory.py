"""Another worker's pool: what its descriptor says is compared with what was opened, and every page number with it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from bench.harness.plain_pages import ids
from quire_common.errors import InvalidArgument, Unavailable
from quire_worker.cuda.peers.driver import HANDLE_BYTES, CudaDriver, cuda_driver
from quire_worker.cuda.peers.ipc_memory import IpcMemory
from quire_worker.cuda.peers.peer_memories import PeerMemories
from quire_worker.cuda.peers.peer_memory import PeerMemory
from quire_worker.kv_transfer.peers.peer_access import host_id

HANDLE = bytes(range(HANDLE_BYTES))
BASE, ALLOCATION = 1 << 40, 10_000
PAGE = 1024


class FakeDriver(CudaDriver):
    """One allocation of another process."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def allocation_of(self, address: int) -> tuple[int, int]:
        return BASE, ALLOCATION

    def open(self, handle: bytes) -> int:
        self.opened.append(handle)
        return BASE

    def close(self, address: int) -> None:
        self.closed.append(address)


def memory(offset: int = 512, size: int = 8 * PAGE) -> IpcMemory:
    return IpcMemory(HANDLE, offset, size, b"g" * 16, host_id())


def test_a_descriptor_says_all_of_it() -> None:
    wanted = memory()
    assert IpcMemory.unpack(wanted.pack()) == wanted
    assert wanted.pack().endswith(host_id()), "who has only the descriptor sees of which host it is"
    assert HANDLE.hex() not in repr(wanted) and repr(HANDLE) not in repr(wanted)
    for descriptor in (b"", wanted.pack()[:-1], wanted.pack() + b"0"):
        with pytest.raises(InvalidArgument, match="BAD_DESCRIPTOR"):
            IpcMemory.unpack(descriptor)


def test_pages_are_those_of_the_pool() -> None:
    driver = FakeDriver()
    peer = PeerMemory(memory(), PAGE, driver)
    assert driver.opened == [HANDLE] and (peer.address, peer.num_pages) == (BASE + 512, 8)
    peer.check(ids(1, 7, 3))
    peer.check(ids())
    for pages in (ids(0), ids(3, 8), ids(-1, 2)):
        with pytest.raises(InvalidArgument, match="BAD_PAGE"):
            peer.check(pages)
    peer.close()
    peer.close()
    assert driver.closed == [BASE]


def test_what_is_not_read_any_more_is_closed() -> None:
    driver, drained, now = FakeDriver(), list[int](), [0.0]
    peers = PeerMemories(PAGE, lambda: drained.append(len(driver.closed)), lambda: driver, lambda: now[0])
    one, other = memory().pack(), memory(offset=1024).pack()
    for now[0] in (0.0, 1.5):
        with peers.using(one) as peer:
            assert peer.address == BASE + 512
    with peers.using(other) as peer:
        assert peer.address == BASE + 1024
    assert len(driver.opened) == 2, "an open one is not opened again"
    now[0] = 3.0
    with peers.using(other):
        pass
    peers.close_idle(2.0)
    assert driver.closed == [] and drained == []
    now[0] = 3.5
    peers.close_idle(2.0)
    assert driver.closed == [BASE] and drained == [0], "what reads it has ended before"
    with peers.using(one):
        pass
    peers.close()
    assert len(driver.opened) == len(driver.closed) == 3
    with pytest.raises(InvalidArgument, match="BAD_DESCRIPTOR"), peers.using(b"short"):
        raise AssertionError("it cannot be used")


@pytest.mark.parametrize(("offset", "size"), [(512, 10 * PAGE), (1 << 60, PAGE), (0, 1 << 60), (0, PAGE + 1)])
def test_a_pool_that_is_not_in_the_allocation_is_closed_and_refused(offset: int, size: int) -> None:
    driver = FakeDriver()
    with pytest.raises(InvalidArgument, match="BAD_DESCRIPTOR"):
        PeerMemory(memory(offset, size), PAGE, driver)
    assert driver.closed == [BASE]


@pytest.mark.parametrize("offset", [8, 513])
def test_a_pool_that_is_not_aligned_is_closed_and_refused(offset: int) -> None:
    driver = FakeDriver()
    with pytest.raises(InvalidArgument, match=r"BAD_DESCRIPTOR: .* aligned to 16 bytes"):
        PeerMemory(memory(offset, PAGE), PAGE, driver)
    assert driver.closed == [BASE]


def test_memory_without_a_known_allocation_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FakeDriver, address: int) -> tuple[int, int]:
        raise Unavailable("CUDA_DRIVER", "It failed.", "Look at the driver.")

    monkeypatch.setattr(FakeDriver, "allocation_of", fails)
    driver = FakeDriver()
    with pytest.raises(Unavailable, match="CUDA_DRIVER"):
        PeerMemory(memory(), PAGE, driver)
    assert driver.closed == [BASE]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(Unavailable, match="CUDA_DRIVER"):
        cuda_driver()


class Failing:
    """A driver's library whose calls all fail."""

    @staticmethod
    def cuIpcCloseMemHandle(address: int) -> int:
        return 201

    @staticmethod
    def cuGetErrorName(status: int, name: ctypes.c_char_p) -> int:
        return 1


def test_a_failed_call_is_named() -> None:
    driver = CudaDriver.__new__(CudaDriver)
    driver.library = Failing()  # type: ignore[assignment]  # a stand-in
    with pytest.raises(Unavailable, match="cuIpcCloseMemHandle failed: error 201"):
        driver.close(BASE)
