"""Data connections of a running kvstore: what is refused, and that others do not notice."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
from typing import TYPE_CHECKING

import pytest

from quire.v1 import kvstore_pb2
from quire_common.columns import pack_i32
from quire_common.kv_data.frame import FRAME_BYTES, MAX_PAYLOAD_BYTES, FrameKind, Head
from quire_common.kv_data.lease_key import handle_of
from quire_common.pages import HEADER_BYTES
from tests.contract.kvstore.data_client import DataClient, dial, ended
from tests.contract.kvstore.data_rig import (
    begin,
    begin_of,
    eventually_refused,
    lent,
    look_up,
    over_tcp,
    over_unix,
    refused,
)
from tests.contract.kvstore.test_kvstore_service import A, B, Running, serving
from tests.unit.kvstore.pages import BODY_BYTES, body, config, framed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = b"k" * 32


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(config(64, sweep_s=0.02)) as service:
        yield service


@pytest.mark.parametrize("offset", [BODY_BYTES, 1, 1 << 62, (1 << 64) - 1])
def test_memory_that_does_not_reach_so_far_is_refused(running: Running, offset: int) -> None:
    told, before = begin(running), refused("shm", "bad_memory")
    fd = lent(body(A, 0))
    with over_unix(told) as client:
        client.send(FrameKind.LEND, fds=[fd])
        client.answer()
        client.send(FrameKind.TAKE, page=0, offset=offset, header=framed(A, 0)[:HEADER_BYTES])
        assert ended(client.connection.sock)
    os.close(fd)
    eventually_refused("shm", "bad_memory", before)
    assert running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=told.lease), timeout=60).stored == 0


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(BODY_BYTES)
        return os.dup(file.fileno())


def memory(size: int, seals: int) -> int:
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    "make",
    [
        a_pipe,
        a_file,
        lambda: memory(4096, 0),
        lambda: memory(4096, fcntl.F_SEAL_GROW),
        lambda: memory(4096, fcntl.F_SEAL_SHRINK),
        lambda: memory(0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
        lambda: memory((1 << 30) + 1, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
    ],
)
def test_what_is_no_memory_of_a_fixed_size_is_not_taken(running: Running, make: Callable[[], int]) -> None:
    """A read from it could wait for ever, or kill the reader."""
    told, before = begin(running), refused("shm", "bad_memory")
    fd = make()
    with over_unix(told) as client:
        client.send(FrameKind.LEND, fds=[fd])
        assert ended(client.connection.sock)
    os.close(fd)
    eventually_refused("shm", "bad_memory", before)
    running.client.release(told.lease)


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_without_the_key_nothing_is_to_be_had(running: Running, path: str) -> None:
    running.put(A)
    told = look_up(running)
    address: tuple[str, int] | str = ("127.0.0.1", told.data_port) if path == "tcp" else told.arena
    forged, unknown = refused(path, "forged"), refused(path, "unknown_lease")
    kind = FrameKind.GET if path == "tcp" else FrameKind.MAP
    with DataClient(address, KEY, handle_of(told.lease_key)) as client:  # the handle was overheard
        client.send(kind, pack_i32([0]) if path == "tcp" else b"")
        assert ended(client.connection.sock)
    eventually_refused(path, "forged", forged)
    for handle in (handle_of(KEY), told.lease, bytes(16)):
        with DataClient(address, KEY, handle) as client:
            client.send(kind)
            assert ended(client.connection.sock)
    eventually_refused(path, "unknown_lease", unknown + 2)
    # A forged part of a put touches nothing of what has come.
    put = begin_of(running)
    with over_tcp(put) as writer:
        writer.send(FrameKind.PUT, body(B, 0), page=0, last=True, header=framed(B, 0)[:HEADER_BYTES])
        assert writer.answer()[0].kind is FrameKind.TAKEN
        with DataClient(("127.0.0.1", put.data_port), KEY, handle_of(put.lease_key)) as forger:
            forger.send(FrameKind.PUT, bytes(BODY_BYTES), page=0)
            ended(forger.connection.sock)
    assert running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=put.lease), timeout=60).stored == 1


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_frames_of_the_other_path_are_none(running: Running, path: str) -> None:
    told, before = begin(running), refused(path, "garbage")
    with over_tcp(told) if path == "tcp" else over_unix(told) as client:
        client.send(FrameKind.MAP if path == "tcp" else FrameKind.GET)
        assert ended(client.connection.sock)
    eventually_refused(path, "garbage", before)
    running.client.release(told.lease)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * 16 + b"GET / HTTP/1.1\r\nHost: quire\r\n".ljust(FRAME_BYTES), "garbage"),
        (
            bytes(16) + Head(FrameKind.GET, bytes(16), length=MAX_PAYLOAD_BYTES + 1).pack().ljust(FRAME_BYTES),
            "oversized",
        ),
        (bytes(16) + Head(FrameKind.GET, bytes(16), length=8).pack().ljust(FRAME_BYTES), "unknown_lease"),
    ],
)
def test_garbage_ends_its_own_connection_alone(running: Running, data: bytes, reason: str) -> None:
    running.put(A)
    told, before = look_up(running), refused("tcp", reason)
    with over_tcp(told) as client:
        client.send(FrameKind.GET, pack_i32([1]))
        with dial(("127.0.0.1", told.data_port)) as garbage:
            garbage.sendall(data)
            assert ended(garbage)
        eventually_refused("tcp", reason, before)
        assert client.answer()[1] == body(A, 1)
        assert client.answer()[0].kind is FrameKind.END


def test_the_slow_are_cut_off_and_make_room() -> None:
    with serving(config(64, max_data_connections=3, data_timeout_s=0.3)) as running:
        running.put(A)
        told, slow = look_up(running), refused("tcp", "slow")
        with dial(("127.0.0.1", told.data_port)) as silent:
            assert ended(silent)
        eventually_refused("tcp", "slow", slow)
    with serving(config(64, max_data_connections=3)) as running:
        running.put(A)
        told, many = look_up(running), refused("tcp", "too_many")
        address = ("127.0.0.1", told.data_port)
        waiting = [dial(address) for _ in range(3)]
        for sock in waiting:
            assert len(sock.recv(24, socket.MSG_WAITALL)) == 24, "all are greeted"
        with over_tcp(told) as first, over_tcp(told) as second, over_tcp(told) as third:
            for client in (first, second, third):
                client.send(FrameKind.GET, pack_i32([2]))
                assert client.answer()[1] == body(A, 2)
            eventually_refused("tcp", "too_many", many + 2)
            assert all(map(ended, waiting)), "who has shown no key makes room"
            with dial(address) as late:
                assert ended(late), "but who has shown one does not"
        for sock in waiting:
            sock.close()


def test_a_connection_without_a_thread_is_closed_and_the_next_one_served(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.put(A)
    told, before = look_up(running), refused("tcp", "no_thread")
    real, none_left = threading.Thread.start, [True]

    def start(thread: threading.Thread) -> None:
        if thread.name == "data" and none_left:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with dial(("127.0.0.1", told.data_port)) as sock:
            assert ended(sock)
    eventually_refused("tcp", "no_thread", before + 1)
    none_left.clear()
    with over_tcp(told) as client:
        client.send(FrameKind.GET, pack_i32([1]))
        assert client.answer()[1] == body(A, 1)
