"""Data connections of a running kvstore: what a key opens."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.v1 import kvstore_pb2
from quire_common.columns import i32, pack_i32
from quire_common.kv_data import frame
from quire_common.kv_data.frame import FrameKind
from quire_common.pages import HEADER_BYTES, check_page
from quire_kvstore.data.data_port import DataPort
from quire_kvstore.page_store import PageStore
from tests.contract.kvstore.data_client import dial
from tests.contract.kvstore.data_rig import begin, begin_of, lent, look_up, over_tcp, over_unix
from tests.contract.kvstore.test_kvstore_service import A, B, Running, keys, refusal, serving
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, body, config, framed, part

if TYPE_CHECKING:
    from collections.abc import Iterator

BIG = 3 << 20


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(config(64, sweep_s=0.02)) as service:
        yield service


def test_pages_come_over_the_data_port(running: Running) -> None:
    assert running.put(A) == 8
    told = look_up(running)
    with over_tcp(told) as client:
        client.send(FrameKind.GET, pack_i32([5, 0]))
        for index in (5, 0):
            head, data = client.answer()
            assert (head.kind, head.page, head.last) == (FrameKind.PAGE, index, True)
            assert head.page_header + data == framed(A, index)
        assert client.answer()[0].kind is FrameKind.END
        client.send(FrameKind.GET, pack_i32([8]))
        assert client.refusal() == "BAD_PAGE_INDEX"
        client.send(FrameKind.GET, b"abc")
        assert client.refusal() == "BAD_COLUMN"
        running.client.release(told.lease)
        client.send(FrameKind.GET, pack_i32([0]))
        assert client.refusal() == "LEASE_UNKNOWN"


def test_pages_go_over_the_data_port(running: Running) -> None:
    told = begin(running)
    with over_tcp(told) as client:
        for index in range(7):
            data = body(A, index)
            client.send(FrameKind.PUT, data[:500], page=index, header=framed(A, index)[:HEADER_BYTES])
            client.send(FrameKind.PUT, data[500:], page=index, offset=500, last=True)
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
            client.send(FrameKind.PUT, body(A, 0)[:64], page=0, header=framed(A, 0)[:HEADER_BYTES])
            client.send(FrameKind.PUT, body(A, 0)[65:], page=0, offset=65)
            client.send(FrameKind.PUT, body(A, 0)[64:], page=0, offset=64, last=True)
            assert client.refusal() == "BAD_PUT_FRAME"
        client.send(FrameKind.PUT, body(A, 1), page=1, last=True, header=framed(A, 1)[:HEADER_BYTES])
        assert client.answer()[0].page == 1, "others are not"
        client.send(FrameKind.PUT, body(A, 0), page=0, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.answer()[0].page == 0, "and it may be tried again"
        client.send(FrameKind.PUT, body(A, 0), page=9, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.refusal() == "BAD_PUT_FRAME"
        running.client.release(told.lease)
        client.send(FrameKind.PUT, body(A, 0), page=0, last=True, header=framed(A, 0)[:HEADER_BYTES])
        assert client.refusal() == "LEASE_UNKNOWN"


def test_big_pages_travel_in_parts() -> None:
    with serving(config(64, ram_bytes=40 << 20)) as running:
        assert running.client.put_pages(A, "uint8", BIG, lambda index: body(A, index, BIG)).stored == 8
        told = look_up(running)
        with over_tcp(told) as client:
            client.send(FrameKind.GET, pack_i32([7]))
            parts: list[bytes] = []
            last = False
            while not last:
                head, data = client.answer()
                assert head.offset == sum(map(len, parts)) and head.page_header == framed(A, 7, BIG)[:HEADER_BYTES]
                parts.append(data)
                last = head.last
            assert b"".join(parts) == body(A, 7, BIG) and len(parts) == -(-BIG // frame.BODY_BYTES) > 1


def test_pages_are_read_where_they_lie(running: Running) -> None:
    running.put(A)
    told = look_up(running)
    attached = running.stub.Attach(kvstore_pb2.AttachRequest(lease=told.lease), timeout=60)
    assert (attached.offsets, attached.generations) == (told.offsets, told.generations)
    assert (attached.lease_key, attached.arena, attached.data_port) == (told.lease_key, told.arena, told.data_port)
    with over_unix(told) as client:
        client.send(FrameKind.MAP)
        frame = client.arrived()
        assert frame is not None and client.connection.verify_head(frame, client.seals).kind is FrameKind.END
        (fd,) = frame.fds
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", told.offsets[0])
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as arena:
            for index, (offset, generation) in enumerate(zip(told.offsets, told.generations, strict=True)):
                assert arena[offset : offset + FRAMED_BYTES] == framed(A, index)
                assert int.from_bytes(arena[offset - 64 : offset - 56], "little") == generation
            frame.close_fds()
            # The lease ends and others take the place: its generation says so.
            running.client.release(told.lease)
            assert running.client.put_pages(B, "uint8", 8 * BODY_BYTES, lambda i: body(B, i, 8 * BODY_BYTES)).stored
            offset = told.offsets[7]
            assert int.from_bytes(arena[offset - 64 : offset - 56], "little") != told.generations[7]
    with pytest.raises(ConnectionRefusedError):
        dial("quire-kvstore-" + "0" * 32)
    assert refusal(lambda: running.stub.Attach(kvstore_pb2.AttachRequest(lease=told.lease))).code == "LEASE_UNKNOWN"


def test_pages_are_taken_from_where_the_writer_has_them(running: Running) -> None:
    told = begin(running)
    fd = lent(b"#" * 100, *(body(A, index) for index in range(8)))
    with over_unix(told) as client:
        client.send(FrameKind.LEND, fds=[fd])
        assert client.answer()[0].kind is FrameKind.END
        for index in range(8):
            client.send(
                FrameKind.TAKE, page=index, offset=100 + index * BODY_BYTES, header=framed(A, index)[:HEADER_BYTES]
            )
        assert [client.answer()[0].page for _ in range(8)] == list(range(8))
        os.pwrite(fd, bytes(9000), 0)  # too late to be of any effect
        client.send(FrameKind.TAKE, page=8)
        assert client.refusal() == "BAD_PUT_FRAME"
    os.close(fd)
    assert running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=told.lease), timeout=60).stored == 8
    pages = running.client.get_pages(running.client.lookup(A).lease)
    assert all(bytes(check_page(page, A.key(index))) == body(A, index) for index, page in pages)


def test_a_page_that_its_reader_doubts_is_looked_at(running: Running) -> None:
    running.put(A)
    told = look_up(running)
    with over_tcp(told) as tcp, over_unix(told) as unix:
        for client in (tcp, unix):
            client.send(FrameKind.DAMAGED, page=3)
            assert client.answer()[0].page == 1, "it is intact: the fault was on the way"
        arena = running.service.store._ram._arena
        with arena.view(told.offsets[3], FRAMED_BYTES) as view:
            view[500] ^= 1
        unix.send(FrameKind.DAMAGED, page=3)
        assert unix.answer()[0].page == 0
        assert running.client.lookup(A, pin=False).pages == 3
        assert running.service.store.stats().counts.corrupt == 1
        tcp.send(FrameKind.DAMAGED, page=8)
        assert tcp.refusal() == "BAD_PAGE_INDEX"


def test_a_lease_that_ends_in_the_middle_of_a_get_ends_the_get() -> None:
    with serving(config(64, ram_bytes=64 << 20)) as running:
        size = 4 << 20
        assert running.client.put_pages(A, "uint8", size, lambda index: body(A, index, size)).stored == 8
        told = look_up(running)
        with over_tcp(told) as client:
            client.send(FrameKind.GET, pack_i32(range(8)))
            came = 0
            while True:
                head, data = client.answer()
                if head.kind is not FrameKind.PAGE:
                    break
                assert data == body(A, head.page, size)[head.offset : head.offset + head.length], "never wrong bytes"
                came += head.last
                if came == 1 and head.last:
                    running.client.release(told.lease)
                    assert running.client.put_pages(B, "uint8", size, lambda i: body(B, i, size)).stored
            assert head.kind is FrameKind.REFUSED and data == b"LEASE_UNKNOWN" and came < 8


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


def test_a_data_port_closes_once() -> None:
    settings = config(8)
    store = PageStore(settings)
    port = DataPort(settings, "127.0.0.1", store)
    port.start()
    port.close()
    reader, writer = os.pipe()  # These may get the numbers of the closed descriptors.
    port.close()
    os.write(writer, b"x")
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    os.close(writer)
    store.close()
