"""Data connections of a running kvstore: what a key opens, what is refused, and that others do not notice."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.v1 import kvstore_pb2
from quire_common.columns import i32, pack_i32
from quire_common.kv_data.frame import FRAME_BYTES, MAX_PAYLOAD_BYTES, Head, Kind
from quire_common.kv_data.lease_key import handle_of
from quire_common.pages import HEADER_BYTES, check_page
from quire_common.telemetry.metrics import render
from tests.contract.data_client import DataClient, dial, ended
from tests.contract.test_kvstore_service import A, B, Running, keys, refusal, serving
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, body, config, framed, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = b"k" * 32
BIG = 3 << 20


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(config(64, sweep_s=0.02)) as service:
        yield service


def look_up(running: Running, lease_ms: int = 60_000) -> Any:
    request = kvstore_pb2.LookupAndPinRequest(keys=keys(A), lease_ms=lease_ms, direct=True)
    return running.stub.LookupAndPin(request, timeout=60)


def begin(running: Running, page_bytes: int = BODY_BYTES) -> Any:
    request = kvstore_pb2.BeginPutRequest(keys=keys(A), page_bytes=page_bytes)
    return running.stub.BeginPut(request, timeout=60)


def over_tcp(told: Any) -> DataClient:
    return DataClient(("127.0.0.1", told.data_port), told.lease_key)


def over_unix(told: Any) -> DataClient:
    return DataClient(told.arena, told.lease_key)


def refused(path: str, reason: str) -> float:
    found = re.search(rf'data_refused_total{{path="{path}",reason="{reason}"}} ([0-9.]+)', render().decode())
    return float(found.group(1)) if found else 0.0


def eventually_refused(path: str, reason: str, before: float) -> None:
    clock = threading.Event()
    for _ in range(3000):
        if refused(path, reason) > before:
            return
        clock.wait(0.02)
    raise AssertionError(f"{reason} was not counted")


def test_pages_come_over_the_data_port(running: Running) -> None:
    assert running.put(A) == 8
    told = look_up(running)
    with over_tcp(told) as client:
        client.send(Kind.GET, pack_i32([5, 0]))
        for index in (5, 0):
            head, data = client.answer()
            assert (head.kind, head.page, head.last) == (Kind.PAGE, index, True)
            assert head.page_header + data == framed(A, index)
        assert client.answer()[0].kind is Kind.END
        client.send(Kind.GET, pack_i32([8]))
        assert client.refusal() == "BAD_PAGE_INDEX"
        client.send(Kind.GET, b"abc")
        assert client.refusal() == "BAD_COLUMN"
        running.client.release(told.lease)
        client.send(Kind.GET, pack_i32([0]))
        assert client.refusal() == "LEASE_UNKNOWN"


def test_pages_go_over_the_data_port(running: Running) -> None:
    told = begin(running)
    with over_tcp(told) as client:
        for index in range(7):
            data = body(A, index)
            client.send(Kind.PUT, data[:500], page=index, header=framed(A, index)[:HEADER_BYTES])
            client.send(Kind.PUT, data[500:], page=index, offset=500, last=True)
        assert [client.answer()[0].page for _ in range(7)] == list(range(7))
    done = running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=told.lease), timeout=60)
    assert (done.stored, done.refused) == (7, 1)
    pages = dict(running.client.get_pages(running.client.lookup(A).lease))
    assert {index: bytes(check_page(page, A.key(index))) for index, page in pages.items()} == {
        index: body(A, index) for index in range(7)
    }


def test_a_page_that_is_refused_is_told_so_at_its_end(running: Running) -> None:
    told = begin(running)
    with over_tcp(told) as client:
        for _ in range(2):
            client.send(Kind.PUT, body(A, 0)[:64], page=0, header=framed(A, 0)[:HEADER_BYTES])
            client.send(Kind.PUT, body(A, 0)[65:], page=0, offset=65)
            client.send(Kind.PUT, body(A, 0)[64:], page=0, offset=64, last=True)
            assert client.refusal() == "BAD_PUT_FRAME"
        client.send(Kind.PUT, body(A, 1), page=1, last=True, header=framed(A, 1)[:HEADER_BYTES])
        assert client.answer()[0].page == 1, "others are not"
        client.send(Kind.PUT, body(A, 0), page=0, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.answer()[0].page == 0, "and it may be tried again"
        client.send(Kind.PUT, body(A, 0), page=9, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.refusal() == "BAD_PUT_FRAME"
        running.client.release(told.lease)
        client.send(Kind.PUT, body(A, 0), page=0, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.refusal() == "LEASE_UNKNOWN"


def test_big_pages_travel_in_parts() -> None:
    with serving(config(64, ram_bytes=40 << 20)) as running:
        assert running.client.put_pages(A, "uint8", BIG, lambda index: body(A, index, BIG)).stored == 8
        told = look_up(running)
        with over_tcp(told) as client:
            client.send(Kind.GET, pack_i32([7]))
            parts: list[bytes] = []
            last = False
            while not last:
                head, data = client.answer()
                assert head.offset == sum(map(len, parts)) and head.page_header == framed(A, 7, BIG)[:HEADER_BYTES]
                parts.append(data)
                last = head.last
            assert b"".join(parts) == body(A, 7, BIG) and len(parts) == 2


def test_pages_are_read_where_they_lie(running: Running) -> None:
    running.put(A)
    told = look_up(running)
    attached = running.stub.Attach(kvstore_pb2.AttachRequest(lease=told.lease), timeout=60)
    assert (attached.offsets, attached.generations) == (told.offsets, told.generations)
    assert (attached.lease_key, attached.arena, attached.data_port) == (told.lease_key, told.arena, told.data_port)
    with over_unix(told) as client:
        client.send(Kind.MAP)
        arrived = client.arrived()
        assert arrived is not None and client.connection.admit(arrived, client.seals).kind is Kind.END
        (fd,) = arrived.fds
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", told.offsets[0])
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as arena:
            for index, (offset, generation) in enumerate(zip(told.offsets, told.generations, strict=True)):
                assert arena[offset : offset + FRAMED_BYTES] == framed(A, index)
                assert int.from_bytes(arena[offset - 64 : offset - 56], "little") == generation
            arrived.close_fds()
            # The lease ends and others take the place: its generation says so.
            running.client.release(told.lease)
            assert running.client.put_pages(B, "uint8", 8 * BODY_BYTES, lambda i: body(B, i, 8 * BODY_BYTES)).stored
            offset = told.offsets[7]
            assert int.from_bytes(arena[offset - 64 : offset - 56], "little") != told.generations[7]
    with pytest.raises(ConnectionRefusedError):
        dial("quire-kvstore-" + "0" * 32)
    assert refusal(lambda: running.stub.Attach(kvstore_pb2.AttachRequest(lease=told.lease))).code == "LEASE_UNKNOWN"


def lent(*pages: bytes) -> int:
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.write(fd, b"".join(pages))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_pages_are_taken_from_where_the_writer_has_them(running: Running) -> None:
    told = begin(running)
    fd = lent(b"#" * 100, *(body(A, index) for index in range(8)))
    with over_unix(told) as client:
        client.send(Kind.LEND, fds=[fd])
        assert client.answer()[0].kind is Kind.END
        for index in range(8):
            client.send(Kind.TAKE, page=index, offset=100 + index * BODY_BYTES, header=framed(A, index)[:HEADER_BYTES])
        assert [client.answer()[0].page for _ in range(8)] == list(range(8))
        os.pwrite(fd, bytes(9000), 0)  # too late to be of any effect
        client.send(Kind.TAKE, page=8)
        assert client.refusal() == "BAD_PUT_FRAME"
    os.close(fd)
    assert running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=told.lease), timeout=60).stored == 8
    pages = running.client.get_pages(running.client.lookup(A).lease)
    assert all(bytes(check_page(page, A.key(index))) == body(A, index) for index, page in pages)


@pytest.mark.parametrize("offset", [BODY_BYTES, 1, 1 << 62, (1 << 64) - 1])
def test_memory_that_does_not_reach_so_far_is_refused(running: Running, offset: int) -> None:
    told, before = begin(running), refused("shm", "bad_memory")
    fd = lent(body(A, 0))
    with over_unix(told) as client:
        client.send(Kind.LEND, fds=[fd])
        client.answer()
        client.send(Kind.TAKE, page=0, offset=offset, header=framed(A, 0)[:HEADER_BYTES])
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
        client.send(Kind.LEND, fds=[fd])
        assert ended(client.connection.sock)
    os.close(fd)
    eventually_refused("shm", "bad_memory", before)
    running.client.release(told.lease)


def test_a_page_that_its_reader_doubts_is_looked_at(running: Running) -> None:
    running.put(A)
    told = look_up(running)
    with over_tcp(told) as tcp, over_unix(told) as unix:
        for client in (tcp, unix):
            client.send(Kind.DAMAGED, page=3)
            assert client.answer()[0].page == 1, "it is intact: the fault was on the way"
        arena = running.service.store._tier._arena
        with arena.view(told.offsets[3], FRAMED_BYTES) as view:
            view[500] ^= 1
        unix.send(Kind.DAMAGED, page=3)
        assert unix.answer()[0].page == 0
        assert running.client.lookup(A, pin=False).pages == 3
        assert running.service.store.stats().counts.corrupt == 1
        tcp.send(Kind.DAMAGED, page=8)
        assert tcp.refusal() == "BAD_PAGE_INDEX"


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_without_the_key_nothing_is_to_be_had(running: Running, path: str) -> None:
    running.put(A)
    told = look_up(running)
    address: tuple[str, int] | str = ("127.0.0.1", told.data_port) if path == "tcp" else told.arena
    forged, unknown = refused(path, "forged"), refused(path, "unknown_lease")
    kind = Kind.GET if path == "tcp" else Kind.MAP
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
        writer.send(Kind.PUT, body(B, 0), page=0, last=True, header=framed(B, 0)[:HEADER_BYTES])
        assert writer.answer()[0].kind is Kind.TAKEN
        with DataClient(("127.0.0.1", put.data_port), KEY, handle_of(put.lease_key)) as forger:
            forger.send(Kind.PUT, bytes(BODY_BYTES), page=0)
            ended(forger.connection.sock)
    assert running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=put.lease), timeout=60).stored == 1


def begin_of(running: Running) -> Any:
    request = kvstore_pb2.BeginPutRequest(keys=keys(part(B, 0, 1)), page_bytes=BODY_BYTES)
    return running.stub.BeginPut(request, timeout=60)


@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_frames_of_the_other_path_are_none(running: Running, path: str) -> None:
    told, before = begin(running), refused(path, "garbage")
    with over_tcp(told) if path == "tcp" else over_unix(told) as client:
        client.send(Kind.MAP if path == "tcp" else Kind.GET)
        assert ended(client.connection.sock)
    eventually_refused(path, "garbage", before)
    running.client.release(told.lease)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * 16 + b"GET / HTTP/1.1\r\nHost: quire\r\n".ljust(FRAME_BYTES), "garbage"),
        (bytes(16) + Head(Kind.GET, bytes(16), length=MAX_PAYLOAD_BYTES + 1).pack().ljust(FRAME_BYTES), "oversized"),
        (bytes(16) + Head(Kind.GET, bytes(16), length=8).pack().ljust(FRAME_BYTES), "unknown_lease"),
    ],
)
def test_garbage_ends_its_own_connection_alone(running: Running, data: bytes, reason: str) -> None:
    running.put(A)
    told, before = look_up(running), refused("tcp", reason)
    with over_tcp(told) as client:
        client.send(Kind.GET, pack_i32([1]))
        with dial(("127.0.0.1", told.data_port)) as garbage:
            garbage.sendall(data)
            assert ended(garbage)
        eventually_refused("tcp", reason, before)
        assert client.answer()[1] == body(A, 1)
        assert client.answer()[0].kind is Kind.END


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
                client.send(Kind.GET, pack_i32([2]))
                assert client.answer()[1] == body(A, 2)
            eventually_refused("tcp", "too_many", many + 2)
            assert all(map(ended, waiting)), "who has shown no key makes room"
            with dial(address) as late:
                assert ended(late), "but who has shown one does not"
        for sock in waiting:
            sock.close()


def test_a_lease_that_ends_in_the_middle_of_a_get_ends_the_get() -> None:
    with serving(config(64, ram_bytes=64 << 20)) as running:
        size = 4 << 20
        assert running.client.put_pages(A, "uint8", size, lambda index: body(A, index, size)).stored == 8
        told = look_up(running)
        with over_tcp(told) as client:
            client.send(Kind.GET, pack_i32(range(8)))
            came = 0
            while True:
                head, data = client.answer()
                if head.kind is not Kind.PAGE:
                    break
                assert data == body(A, head.page, size)[head.offset : head.offset + head.length], "never wrong bytes"
                came += head.last
                if came == 1 and head.last:
                    running.client.release(told.lease)
                    assert running.client.put_pages(B, "uint8", size, lambda i: body(B, i, size)).stored
            assert head.kind is Kind.REFUSED and data == b"LEASE_UNKNOWN" and came < 8


def test_it_says_which_ways_there_are(running: Running) -> None:
    stats = running.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
    assert stats.data_port and re.fullmatch("quire-kvstore-[0-9a-f]{32}", stats.arena)
    with serving(config(8, data_port=-1, share_memory=False)) as without:
        stats = without.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
        assert (stats.data_port, stats.arena) == (0, "")
        without.put(part(A, 0, 4))
        told = look_up(without)
        assert (told.pages, told.data_port, told.arena, list(told.offsets)) == (4, 0, "", [])
    lookup = running.client.lookup(A)
    assert lookup.pages == 0


def test_only_a_direct_lookup_is_told_more(running: Running) -> None:
    running.put(A)
    plain = running.stub.LookupAndPin(kvstore_pb2.LookupAndPinRequest(keys=keys(A)), timeout=60)
    assert (plain.pages, plain.lease_key, plain.arena, list(plain.offsets)) == (8, b"", "", [])
    assert i32(begin_of(running).wanted).tolist() == [0]


def test_nothing_of_the_arena_is_in_the_file_system(running: Running) -> None:
    names = [path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()]
    assert not [name for name in names if name.startswith("quire-kvstore")]
    told = running.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
    assert f"@{told.arena}" in Path("/proc/net/unix").read_text()
