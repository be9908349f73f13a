"""A AgentProcess with a real process behind it, a pool of bytes before it, and a folder in the store's stead."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.plain_pages import ids
from quire_common.credit import MoveKind, PageMove
from quire_worker.engine.transfer_agent import MoveResult
from quire_worker.kv_transfer.agent_process import COPY_BYTES, AgentProcess
from quire_worker.kv_transfer.copier import Copier, HostCopier
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.side_process.process_link import LinkTimeouts
from tests.fakes.kv_transfer import fake_agent_main

WAIT_S = 60.0
PAGE_BYTES = 256
NAMESPACE = b"n" * 32
EMPTY = b"." * PAGE_BYTES
# A loaded machine may keep a well process waiting for seconds.
QUICK = LinkTimeouts(ping_s=0.1, silent_pings=100, start_pings=600, first_backoff_s=0.01, max_backoff_s=0.1)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def body(number: int) -> bytes:
    return number.to_bytes(2, "big") * (PAGE_BYTES // 2)


class BytesPool:
    """Pages 1.. hold their number until they are written. `broken` refuses all."""

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.pages = [body(page) for page in range(num_pages)]
        self.broken = False

    def read_page(self, page: int, /) -> bytes:
        self._check()
        return self.pages[page]

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        self._check()
        self.pages[page] = bytes(data)

    def clear(self, *pages: int) -> None:
        for page in pages:
            self.pages[page] = EMPTY

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("the pool is gone")


class Gate:
    """Both ends of a pair of FIFOs: the process says that it is there, the test lets pages pass."""

    def __init__(self, folder: Path, kind: str) -> None:
        for name in ("gate", "reached"):
            os.mkfifo(folder / f"{kind}.{name}")
        self._gate = os.open(folder / f"{kind}.gate", os.O_RDWR)
        self._reached = os.open(folder / f"{kind}.reached", os.O_RDWR)

    def await_page(self) -> None:
        assert select.select([self._reached], [], [], WAIT_S)[0], "no page came to the gate"
        os.read(self._reached, 1)

    def let_through(self, pages: int = 1) -> None:
        os.write(self._gate, b"g" * pages)

    def open(self) -> None:
        """Whoever waits may pass, and nobody waits any more."""
        self.let_through(4096)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._reached)


class AgentRig:
    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 4,
        num_pages: int = 64,
        max_open: int = 8,
        copy_bytes: int = COPY_BYTES,
        timeouts: LinkTimeouts = QUICK,
        command: Sequence[str] = (),
        copier: Callable[[BytesPool, Ring], Copier] = HostCopier,
    ) -> None:
        self.folder = folder
        self.pool = BytesPool(num_pages)
        setup = AgentSetup("", NAMESPACE.hex(), "int32", PAGE_BYTES, slots)
        ring = Ring.create(PAGE_BYTES, slots)
        self.copier = copier(self.pool, ring)
        self.transfer_agent = AgentProcess(
            setup,
            ring,
            self.copier,
            command=command or (sys.executable, str(Path(fake_agent_main.__file__)), str(folder)),
            max_open=max_open,
            copy_bytes=copy_bytes,
            timeouts=timeouts,
        )
        self.woken = threading.Event()
        self.transfer_agent.wake = self.woken.set
        self._gates: list[Gate] = []

    def __enter__(self) -> AgentRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.transfer_agent.close()
        for gate in self._gates:
            gate.close()

    def gate(self, kind: MoveKind) -> Gate:
        """From now on pages of such moves wait."""
        self._gates.append(Gate(self.folder, kind.name.lower()))
        return self._gates[-1]

    def do(self, move: PageMove) -> MoveResult:
        assert self.transfer_agent.submit(move)
        (result,) = self.results(1)
        return result

    def results(self, count: int) -> list[MoveResult]:
        """As the model thread does: looks when it is woken."""
        results: list[MoveResult] = []
        while len(results) < count:
            results += self.transfer_agent.take_results()
            if len(results) < count:
                assert self.woken.wait(WAIT_S), f"only {results}"
                self.woken.clear()
        assert len(results) == count
        return results

    def until(self, condition: Callable[[], bool]) -> None:
        """Goes on as the model thread until something has happened; nothing ends meanwhile."""
        while not condition():
            assert self.transfer_agent.take_results() == []
            if not condition():
                assert self.woken.wait(WAIT_S)
                self.woken.clear()

    def drive(self, wait: Callable[[], None]) -> None:
        """Goes on as the model thread while another thread waits for something; nothing ends meanwhile."""
        done = threading.Event()

        def waits() -> None:
            wait()
            done.set()
            self.woken.set()

        waiter = threading.Thread(target=waits)
        waiter.start()
        self.until(done.is_set)
        waiter.join()

    def until_ok(self, move: PageMove) -> None:
        """Submit a move again and again until it succeeds: until there is a process again."""
        clock = threading.Event()
        for _ in range(int(WAIT_S * 50)):
            if self.transfer_agent.submit(move) and self.results(1)[0].ok:
                return
            self.transfer_agent.take_results()
            clock.wait(0.02)
        raise AssertionError("no process came")

    def stored(self, *pages: int) -> None:
        """These pages are in the folder, under their numbers."""
        assert self.do(store(900, *pages)).ok

    def spoil(self, number: int) -> None:
        path = self.folder / digest(number).hex()
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def store(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.STORE, 0, ids(*pages), tuple(digest(page) for page in pages))


def load(move_id: int, first: int, *targets: int) -> PageMove:
    """Bring what is stored as first, first + 1, ... to the targets."""
    hashes = tuple(digest(first + place) for place in range(len(targets)))
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*targets), hashes)
