"""Pages from worker to worker: what one prefills, the other pulls meanwhile, and goes on with."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, MoveKind, PageMove, RankAddress
from quire_common.credit.hello import scheduler_hello
from quire_common.errors import ConfigError
from quire_common.pages import chain_hashes
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.peers import peer_listeners
from quire_worker.kv_transfer.peers.peer_access import neighbourhood
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from tests.fakes.worker.counting_runner import CountingRunner, continuation
from tests.fakes.worker.engine_bench import ROOMY, a_start
from tests.fakes.worker.worker_server import VOCAB, WAIT_S, FakeScheduler, WorkerServer, counting_model
from tests.fakes.worker.worker_side import Side
from tests.tcp_relay import TcpRelay

PROMPT = list(range(20, 34))  # three full pages of 4, and two tokens
HANDLES = (*chain_hashes(PROMPT, 4), b"t" * 32)
TAIL = 2
LEASE_KEY = b"k" * 32
A_CHUNK = Budget(1000, 1000, chunk_cap=4, partial_prefills=9, step_limit=1)


def a_worker(runner: CountingRunner | None = None, **options: str) -> WorkerServer:
    config = WorkerConfig(model="counting", max_num_seqs=4, **options)  # type: ignore[arg-type]  # flags are strings here
    return WorkerServer(lambda config, progress: counting_model(runner), config)


def export(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.EXPORT, 0, ids(*pages), HANDLES, b"id", tail_tokens=TAIL, lease_key=LEASE_KEY)


def pull(move_id: int, source: tuple[RankAddress, ...], *pages: int, first: int = 0) -> PageMove:
    return PageMove(
        move_id, MoveKind.PULL, 0, ids(*pages), HANDLES[first:], b"id",
        tail_tokens=TAIL, lease_key=LEASE_KEY, first_index=first, source=source,
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp", "grpc"])
def test_pull_follows_the_prefill_and_decoding_continues(transport: str) -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker(peer_transport=transport) as prefills, a_worker(runner, peer_transport=transport) as decodes:
        here, there = Side(prefills.stub), Side(decodes.stub)
        here.scheduler.grant(
            start=[a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1)], move=[export(1, 1, 2, 3, 4)], budget=A_CHUNK
        )
        there.scheduler.grant(move=[pull(1, here.hello.data_address, 11, 12, 13, 14)], budget=ROOMY)
        for position in (4, 8, 12):
            here.prefilled(0, position)
            here.scheduler.grant()
        first = here.finished(0)
        assert there.moved(1) == (0, 4) and here.moved(1) == (0, 4)
        np.testing.assert_array_equal(runner.pages[[11, 12, 13]].ravel(), PROMPT[:12])
        start = a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], output=tuple(first), cached=len(PROMPT))
        there.scheduler.grant(start=[start])
        assert first + there.finished(0) == says(8)
        assert runner.batches[0].position.tolist() == [len(PROMPT)], "nothing is computed again"
        assert here.told.errors == there.told.errors == []


@pytest.mark.parametrize("told", [True, False])
def test_peer_transports_start_when_the_scheduler_announces_peers(told: bool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with a_worker() as worker:
        scheduler = FakeScheduler(worker.stub, scheduler_hello(expects_peers=told))
        scheduler.attach()
        deadline_s = time.monotonic() + (WAIT_S if told else 0.2)
        while not (started := {child.pid for child in psutil.Process().children()} - before):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.01)
        assert bool(started) is told
        scheduler.cancel()


def test_worker_tells_whose_memory_it_can_reach() -> None:
    with a_worker() as one, a_worker(peer_transport="tcp") as other:
        assert Side(one.stub).hello.host == Side(other.stub).hello.host == neighbourhood() != b""
    child = [
        sys.executable,
        "-c",
        "from quire_worker.kv_transfer.peers.peer_access import *; print(neighbourhood().decode())",
    ]
    for command, same in ((child, True), (["unshare", "--net", "--map-root-user", *child], False)):
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if told.returncode and not same:
            pytest.skip("network namespaces are not permitted here")
        assert (told.stdout.strip().encode() == neighbourhood()) is same


def half_way(here: Side, there: Side, source: tuple[RankAddress, ...] = ()) -> None:
    """One, whose process that carries pages has started, has prefilled a page of what the other pulls."""
    here.scheduler.grant(
        start=[a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1)], move=[export(1, 1, 2, 3, 4)], budget=A_CHUNK
    )
    until_served(grpc_port(here))
    there.scheduler.grant(move=[pull(1, source or here.hello.data_address, 11, 12, 13, 14)], budget=ROOMY)
    here.prefilled(0, 4)


def grpc_port(side: Side) -> int:
    """Of its Peer service."""
    address = side.hello.data_address[-1]
    assert address.transport == "grpc"
    return int(address.descriptor.rpartition(b":")[2])


def until_served(port: int) -> None:
    """Whoever pulls waits for a process that has yet to start, and not for long."""
    deadline_s, clock = time.monotonic() + WAIT_S, threading.Event()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), WAIT_S):
            return
        assert time.monotonic() < deadline_s, "nobody listens"
        clock.wait(0.02)


def arrived(runner: CountingRunner, page: int, tokens: list[int]) -> None:
    """Wait until a page of the pool holds these; the worker tells only of the whole move."""
    clock = threading.Event()
    for _ in range(3000):
        if runner.pages[page].tolist() == tokens:
            return
        clock.wait(0.01)
    raise AssertionError(f"page {page} did not come")


def goes_on_alone(there: Side, runner: CountingRunner, cached: int) -> None:
    """With what has come, and computes the rest."""
    there.scheduler.grant(
        start=[a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], cached=len(PROMPT), output=tuple(says(1)))]
    )
    assert says(1) + there.finished(0) == says(8) and there.told.errors == []
    assert runner.batches[0].position.tolist() == [cached]


def says(count: int) -> list[int]:
    return continuation(PROMPT, count, VOCAB)


def test_a_pull_is_cancelled_by_a_grant() -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker() as prefills, a_worker(runner) as decodes:
        here, there = Side(prefills.stub), Side(decodes.stub)
        half_way(here, there)
        arrived(runner, 11, PROMPT[:4])
        there.scheduler.grant(cancel_move=np.array([1, 2], np.int64))
        assert there.moved(1) == (1, 1)
        goes_on_alone(there, runner, cached=4)
        here.scheduler.grant(cancel_move=np.array([1], np.int64))
        assert here.moved(1) == (1, 0)


def test_cancelled_export_frees_its_pages() -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker() as prefills, a_worker(runner) as decodes:
        here, there = Side(prefills.stub), Side(decodes.stub)
        half_way(here, there)
        arrived(runner, 11, PROMPT[:4])
        here.scheduler.grant(stop_slot=ids(0), stop_keep_pages=ids(0), cancel_move=np.array([1], np.int64))
        assert here.moved(1) == (1, 0) and there.moved(1) == (1, 1)
        goes_on_alone(there, runner, cached=4)
        here.scheduler.grant(start=[a_start(1, [5] * 6, [1, 2, 3], max_tokens=1)], budget=ROOMY)
        assert here.finished(1) == continuation([5] * 6, 1, VOCAB) and here.told.errors == []


@pytest.mark.deep
def test_takeover_of_the_exporter_ends_earlier_exports() -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker() as prefills, a_worker(runner) as decodes:
        here, there = Side(prefills.stub), Side(decodes.stub)
        half_way(here, there)
        arrived(runner, 11, PROMPT[:4])
        newer = Side(prefills.stub)
        newer.scheduler.grant(start=[a_start(0, [5] * 14, [1, 2, 3, 4], max_tokens=1)], budget=ROOMY)
        newer.finished(0)
        assert there.moved(1) == (1, 1)
        there.scheduler.grant(move=[pull(2, here.hello.data_address, 21, 22, 23, 24)])
        assert there.moved(2) == (1, 0)
        goes_on_alone(there, runner, cached=4)
        assert newer.hello.data_address == here.hello.data_address and newer.told.moved == {}


@pytest.mark.deep
def test_worker_without_a_data_port_still_pulls() -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker(peer_listen="off") as closed, a_worker() as opened:
        here, there = Side(opened.stub), Side(closed.stub)
        assert there.hello.data_address == ()
        there.scheduler.grant(move=[export(1, 1, 2, 3, 4)])
        assert there.moved(1) == (1, 0)
        here.scheduler.grant(
            start=[a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1)], move=[export(1, 1, 2, 3, 4)], budget=ROOMY
        )
        there.scheduler.grant(move=[pull(2, here.hello.data_address, 11, 12, 13, 14)], budget=ROOMY)
        assert there.moved(2) == (0, 4) and here.moved(1) == (0, 4) and runner.batches == []


def test_peer_port_address_follows_the_flags() -> None:
    options = {"listen": "127.0.0.1:7", "peer_listen": "127.0.0.1:0", "peer_transport": "tcp"}
    for more, host in (({}, b"127.0.0.1"), ({"advertise": "engine.local:7"}, b"engine.local"), (
        {"advertise": "engine.local:7", "peer_advertise": "10.0.0.9"}, b"10.0.0.9")):  # fmt: skip
        door = PeerListeners(WorkerConfig(**(options | more)))  # type: ignore[arg-type]  # flags are strings here
        (address,) = door.addresses
        assert address.descriptor.rpartition(b":")[0] == host
        port = address.descriptor.rpartition(b":")[2].decode()
        with pytest.raises(ConfigError, match="--peer-listen") as error:
            PeerListeners(WorkerConfig(peer_listen=f"127.0.0.1:{port}", peer_transport="tcp"))
        assert error.value.code == "PORT_IN_USE"
        door.close()


@pytest.mark.parametrize(
    ("number", "code", "fix"),
    [
        (errno.EADDRINUSE, "PORT_IN_USE", "Choose another port with --peer-listen"),
        (errno.EADDRNOTAVAIL, "BAD_VALUE", "Choose an address of this host"),
        (errno.EACCES, "BAD_VALUE", "Choose an address of this host"),
        (errno.EMFILE, "BAD_VALUE", "Let the service open more files (ulimit -n), or set --peer-listen to off"),
        (errno.ENFILE, "BAD_VALUE", "Let the system open more files"),
        (errno.ENOBUFS, "BAD_VALUE", "Free memory"),
    ],
)
def test_peer_port_that_cannot_be_opened_is_refused_with_the_cause(
    number: int, code: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(peer_listeners, "_listening", refuse)
    with pytest.raises(ConfigError, match=os.strerror(number)) as error:
        PeerListeners(WorkerConfig(peer_listen="192.0.2.1:80", peer_transport="tcp"))
    assert error.value.code == code and error.value.param == "peer_listen"
    assert error.value.fix.startswith(fix)


def test_worker_on_all_interfaces_names_its_routes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, told in (("10.0.0.7", [b"10.0.0.7"]), ("", [])):
        monkeypatch.setattr(peer_listeners, "own_host", lambda family, own=own: own)
        door = PeerListeners(WorkerConfig(listen="0.0.0.0:7", peer_transport="tcp", insecure=True))
        assert [address.descriptor.rpartition(b":")[0] for address in door.addresses] == told
        door.close()


def out_of_reach(told: tuple[RankAddress, ...], grpc_port: int) -> tuple[RankAddress, ...]:
    """On another host, whose data port is refused; its Peer service is at that port."""
    assert [address.transport for address in told] == ["shm", "tcp", "grpc"]
    return RankAddress(0, "tcp", b"127.0.0.1:1"), RankAddress(0, "grpc", f"127.0.0.1:{grpc_port}".encode())


@pytest.mark.parametrize(("mode", "came"), [("pass", 4), ("flip", 0)])
def test_blocked_data_port_falls_back_to_grpc_or_compute(mode: str, came: int) -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker() as prefills, a_worker(runner) as decodes:
        here, there = Side(prefills.stub), Side(decodes.stub)
        # No piece is longer than a page's frame: of several pages at once, none comes as it was.
        with TcpRelay(("127.0.0.1", grpc_port(here)), mode, piece_bytes=64) as relay:
            half_way(here, there, out_of_reach(here.hello.data_address, relay.port))
            here.scheduler.grant(budget=ROOMY)
            assert here.finished(0) == says(1)
            assert there.moved(1) == (0 if came else 1, came) and bool(relay.harmed) == (mode == "flip")
        goes_on_alone(there, runner, cached=len(PROMPT) if came else 0)
        if not came:
            here.scheduler.grant(cancel_move=np.array([1], np.int64))
        assert here.moved(1) == ((0, 4) if came else (1, 0))
