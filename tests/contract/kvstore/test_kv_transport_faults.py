"""Processes that die while pages travel: the kvstore under a KV transfer agent, a KV transfer agent and a whole worker
under the kvstore. All that is left is misses, and nobody's memory stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.harness.plain_pages import ids
from quire.v1 import kvstore_pb2
from quire_common.credit import MoveKind, PageMove
from quire_common.errors import QuireError
from quire_worker.kv_transfer.agent_process import AgentProcess
from quire_worker.kv_transfer.copier import HostCopier
from quire_worker.kv_transfer.kv_connector import ATTACH_S
from quire_worker.kv_transfer.setup import AgentSetup
from tests.contract.kvstore.kv_agent_side import EACH, FAST, agent_side
from tests.contract.kvstore.kvstore_process import Connection, KvstoreProcess
from tests.tiers import deep_after
from tests.unit.kvstore.pages import body, chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_worker.engine.transfer_agent import MoveResult

A, B = chain("a", 8), chain("b", 8)
PAGE_BYTES = 1 << 20
RAM = ("--ram-bytes", str(64 << 20))
# A worker's part of a kvstore's trouble: it pins, begins a put, lends its memory, and is there until it is killed.
HOLDER = """
import sys, time
from tests.contract.kvstore.kv_agent_side import agent_side
from tests.contract.kvstore.test_kv_transport_faults import A, B, PAGE_BYTES
def hold(index):
    if index == 2:
        print("holding", flush=True)
        time.sleep(600)
with agent_side(sys.argv[1], sys.argv[2], page_bytes=PAGE_BYTES) as agent:
    agent.look_up(A, lease_ms=3000)
    agent.store(B, hold)
"""


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Stores that earlier tests had in this process are unmapped by the collector, if nobody was before."""
    gc.collect()


@contextlib.contextmanager
def kvstore(*flags: str) -> Iterator[KvstoreProcess]:
    process = KvstoreProcess(*RAM, *flags)
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


def eventually(condition: Callable[[], bool]) -> None:
    clock = threading.Event()
    for _ in range(3000):
        if condition():
            return
        clock.wait(0.02)
    raise AssertionError("it did not happen")


def mapped(pid: int, name: str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(name)


def left_behind() -> set[str]:
    return {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*quire-kvstore*")}


def stats(connection: Connection) -> Any:
    return connection.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)


@pytest.mark.parametrize("choice", deep_after(1, ["auto", *EACH]))
@pytest.mark.parametrize("way", ["put", "get"])
def test_a_kvstore_killed_under_way_is_a_miss_and_its_successor_serves(choice: str, way: str) -> None:
    before = left_behind()
    with kvstore() as process, agent_side(process.address, choice, page_bytes=PAGE_BYTES) as transfer_agent:
        assert transfer_agent.store(A) == 8
        lease = transfer_agent.look_up(A)

        def kill(index: int) -> None:
            if index == 3:
                process.kill()

        if way == "put":
            with pytest.raises(QuireError):
                transfer_agent.store(B, kill)
        else:
            came = transfer_agent.load(A, lease, kill)
            assert 4 <= came <= 8, "what had come counts, and what came later was compared"
            assert transfer_agent.load(A, lease) == 0
        eventually(lambda: mapped(os.getpid(), "quire-kvstore-arena") == 0)
        successor = KvstoreProcess(*RAM, "--listen", process.address)
        try:
            successor.wait_ready()
            assert transfer_agent.load(A, lease) == 0, "leases of another life are none"
            eventually(lambda: stores(transfer_agent.store))
            assert transfer_agent.load(A, transfer_agent.look_up(A)) == 8
        finally:
            successor.kill()
    assert left_behind() == before


def stores(store: Callable[..., int]) -> bool:
    """It takes a moment until a channel tries again."""
    try:
        return store(A) == 8
    except QuireError:
        return False


@pytest.mark.parametrize("choice", FAST)
def test_a_kvstore_that_hangs_is_a_miss_soon(choice: str) -> None:
    """A request waits for its load."""
    with kvstore() as process, agent_side(process.address, choice, page_bytes=PAGE_BYTES) as transfer_agent:
        assert transfer_agent.store(A) == 8
        lease = transfer_agent.look_up(A)
        process.child.send_signal(signal.SIGSTOP)
        # Until all of its threads have stopped, it may still answer the first of the load's calls.
        os.waitid(os.P_PID, process.child.pid, os.WSTOPPED | os.WNOWAIT)
        began_s = time.monotonic()
        try:
            assert transfer_agent.load(A, lease) == 0
        finally:
            process.child.send_signal(signal.SIGCONT)
        assert time.monotonic() - began_s < ATTACH_S + 1.0
        assert transfer_agent.load(A, transfer_agent.look_up(A)) == 8


@pytest.mark.deep
@pytest.mark.parametrize("choice", deep_after(1, EACH))
def test_what_a_killed_worker_held_comes_back(choice: str) -> None:
    with kvstore("--default-lease-ms", "3000", "--max-lease-ms", "3000") as process, Connection(process.address) as own:
        with agent_side(process.address, "grpc", page_bytes=PAGE_BYTES) as transfer_agent:
            assert transfer_agent.store(A) == 8
        used = own.tier("ram").bytes
        path = os.pathsep.join((str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")))
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, process.address, choice],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "holding\n"
            held = stats(own)
            assert (held.leases, held.pending_puts) == (1, 1)
            assert own.tier("ram").bytes > used
            if choice == "shm":
                assert mapped(process.child.pid, "quire-mover-ring") == 1
        finally:
            holder.kill()
            holder.communicate()
        eventually(lambda: (stats(own).leases, stats(own).pending_puts) == (0, 0))
        eventually(lambda: mapped(process.child.pid, "quire-mover-ring") == 0)
        assert own.tier("ram").bytes == used
        with agent_side(process.address, choice, page_bytes=PAGE_BYTES) as transfer_agent:
            assert transfer_agent.store(B) == 8, "nobody waits for the dead one's pages"
            assert transfer_agent.load(A, transfer_agent.look_up(A)) == 8
        assert process.stop() == 0


class Pool:
    """A worker's pages: those of chain A in 1.., room for as many behind."""

    page_bytes = PAGE_BYTES

    def __init__(self) -> None:
        self.pages = [b"", *(body(A, index, PAGE_BYTES) for index in range(8)), *[b""] * 8]

    def read_page(self, page: int, /) -> bytes:
        return self.pages[page]

    def write_page(self, page: int, data: bytes | memoryview, /) -> None:
        self.pages[page] = bytes(data)


class KvTransferAgent:
    """A AgentProcess and the model thread's part."""

    def __init__(self, address: str, choice: str) -> None:
        self.pool = Pool()
        setup = AgentSetup(address, A.namespace.hex(), "uint8", PAGE_BYTES, slots=4, kv_transport=choice)
        self.process = AgentProcess.start(setup, partial(HostCopier, self.pool))
        self.woken = threading.Event()
        self.process.wake = self.woken.set

    def do(self, kind: MoveKind, first: int, lease: bytes = b"") -> MoveResult | None:
        """None where there is no process."""
        move = PageMove(1, kind, 0, ids(*range(first, first + 8)), A.hashes, lease)
        if not self.process.submit(move):
            return None
        ended: list[MoveResult] = []
        while not ended:
            assert self.woken.wait(60), "nothing moves any more"
            self.woken.clear()
            ended = self.process.take_results()
        return ended[0]

    def ok(self, kind: MoveKind, first: int, lease: bytes = b"") -> bool:
        result = self.do(kind, first, lease)
        return result is not None and result.ok


@pytest.mark.deep
@pytest.mark.parametrize("choice", FAST)
def test_a_mover_killed_under_way_is_a_miss_and_the_next_one_serves(choice: str) -> None:
    with kvstore() as process, Connection(process.address) as own:
        transfer_agent = KvTransferAgent(process.address, choice)
        try:
            eventually(lambda: transfer_agent.ok(MoveKind.STORE, 1))
            lease = own.client.lookup(A, lease_ms=60_000).lease
            pid = transfer_agent.process.pid
            assert pid is not None
            move = PageMove(2, MoveKind.LOAD, 0, ids(*range(9, 17)), A.hashes, lease)
            assert transfer_agent.process.submit(move)
            # Two slots for loads: the KV transfer agent waits for the engine with its connection open.
            eventually(lambda: bool(stats(own).leases) and transfer_agent.woken.is_set())
            os.kill(pid, signal.SIGKILL)
            ended: list[MoveResult] = []
            while not ended:
                assert transfer_agent.woken.wait(60)
                transfer_agent.woken.clear()
                ended = transfer_agent.process.take_results()
            assert not ended[0].ok
            eventually(lambda: transfer_agent.ok(MoveKind.LOAD, 9, lease))
            assert transfer_agent.pool.pages[9:17] == transfer_agent.pool.pages[1:9]
        finally:
            transfer_agent.process.close()
        eventually(lambda: mapped(process.child.pid, "quire-mover-ring") == 0)
        assert process.stop() == 0


def test_a_movers_map_goes_when_the_kvstore_is_killed_though_nothing_moves() -> None:
    with kvstore() as process, Connection(process.address) as own:
        transfer_agent = KvTransferAgent(process.address, "shm")
        try:
            eventually(lambda: transfer_agent.ok(MoveKind.STORE, 1))
            assert transfer_agent.ok(MoveKind.LOAD, 9, own.client.lookup(A, lease_ms=60_000).lease)
            pid = transfer_agent.process.pid
            assert pid is not None and mapped(pid, "quire-kvstore-arena") == 1
            process.kill()
            eventually(lambda: mapped(pid, "quire-kvstore-arena") == 0)
            links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            assert not [link for link in links if "arena" in link]
            assert transfer_agent.process.pid == pid, "and it lives"
        finally:
            transfer_agent.process.close()
