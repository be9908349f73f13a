"""The kvstore killed, starved and lied to, as a process: whoever asks gets right pages or none, and a restart helps."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.v1 import kvstore_pb2
from quire_common.errors import NotFound, QuireError, Unavailable
from quire_common.pages import check_page
from tests.contract.kvstore.kvstore_process import Connection, KvstoreProcess
from tests.redis_server import RedisServer, redis_server
from tests.tiers import deep_after
from tests.unit.kvstore.pages import body, chain, part
from tests.unit.kvstore.tiers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_common.pages import PageRun

__all__ = ["redis_server"]
PAGE_BYTES = 64 << 10
A, B = chain("a", 16), chain("b", 16)
RAM = ("--ram-bytes", str(200 * (PAGE_BYTES + 4096)))


@pytest.fixture
def children() -> Iterator[list[KvstoreProcess]]:
    """All are gone in the end."""
    started: list[KvstoreProcess] = []
    yield started
    for child in started:
        child.kill()


def start(children: list[KvstoreProcess], *flags: str) -> KvstoreProcess:
    child = KvstoreProcess(*RAM, "--drain-timeout-s", "20", "--prefetch-ms", "20000", *flags)
    children.append(child)
    child.wait_ready()
    return child


def put(connection: Connection, run: PageRun) -> int:
    return connection.client.put_pages(
        run, "uint8", PAGE_BYTES, lambda index: body(run, index, PAGE_BYTES), timeout_s=60
    ).stored


def found(connection: Connection, run: PageRun) -> tuple[int, str]:
    """Looks up, reads and compares all that is said to be there, and releases."""
    lookup = connection.client.lookup(run)
    if not lookup.pages:
        return 0, ""
    count = 0
    for index, page in connection.client.get_pages(lookup.lease, timeout_s=60):
        assert bytes(check_page(page, run.key(index), "uint8", PAGE_BYTES)) == body(run, index, PAGE_BYTES)
        count += 1
    assert count == lookup.pages
    assert connection.client.release(lookup.lease) == 1
    return lookup.pages, lookup.medium


def on_disk(connection: Connection, count: int) -> None:
    eventually(lambda: connection.tier("disk").pages == count)


def at_rest(connection: Connection) -> None:
    """Nothing is held by anybody."""
    stats = connection.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
    assert (stats.leases, stats.pending_puts) == (0, 0)


def test_a_restart_finds_its_disk_pages_again(children: list[KvstoreProcess], tmp_path: Path) -> None:
    flags = ("--disk-path", str(tmp_path))
    first = start(children, *flags)
    with Connection(first.address) as connection:
        assert put(connection, A) == 16
        assert found(connection, A) == (16, "ram")
    assert first.stop() == 0, "what was just put is written before it goes"
    second = start(children, *flags)
    with Connection(second.address) as connection:
        assert connection.client.lookup(A, pin=False).pages == 16
        assert found(connection, A) == (16, "disk")
        assert found(connection, A) == (16, "ram")
        disk, ram = connection.tier("disk"), connection.tier("ram")
        assert (disk.hits, disk.misses, disk.bytes_read > 16 * PAGE_BYTES, disk.available) == (16, 0, True, True)
        assert (ram.hits, ram.misses, ram.pages) == (16, 16, 16)
        at_rest(connection)
    assert second.messages("the disk tier is open")[0]["pages"] == 16
    assert second.stop() == 0


def hammer(address: str, runs: list[PageRun], busy: threading.Barrier, stop: threading.Event) -> list[QuireError]:
    """Puts and reads until told to stop, and takes leases that it never releases; returns what went wrong."""
    errors: list[QuireError] = []
    with Connection(address) as connection:
        for turn, run in enumerate(itertools.cycle(runs)):
            try:
                put(connection, run)
                lookup = connection.client.lookup(run)
                for index, page in connection.client.get_pages(lookup.lease) if lookup.pages else ():
                    assert bytes(check_page(page, run.key(index))) == body(run, index, PAGE_BYTES)
            except QuireError as error:
                errors.append(error)
            if turn == 1:
                busy.wait(60)
            if turn > 1 and stop.is_set():
                break
    return errors


def test_killed_kvstore_leaves_no_wrong_page(children: list[KvstoreProcess], tmp_path: Path) -> None:
    """Over and over. Clients see typed errors or misses, never a wrong byte; the disk needs no repair."""
    flags = ("--disk-path", str(tmp_path), "--disk-bytes", str(120 * (PAGE_BYTES + 4096)))
    runs = [chain(f"run {number}", 16) for number in range(12)]
    for round_ in range(3):
        child = start(children, *flags)
        busy, stop = threading.Barrier(4), threading.Event()
        with futures.ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(hammer, child.address, runs[n:] + runs[:n], busy, stop) for n in range(3)]
            busy.wait(60)
            child.kill()
            time.sleep(0.05 * round_)
            stop.set()
            for worker in workers:
                for error in worker.result(timeout=120):
                    assert isinstance(error, Unavailable | NotFound), error
    last = start(children, *flags)
    with Connection(last.address) as connection:
        assert connection.tier("disk").pages > 0
        assert sum(found(connection, run)[0] for run in runs) > 0
        assert connection.tier("disk").errors == 0
        at_rest(connection)
    assert not list(tmp_path.rglob("*.tmp")), "what was half written is gone"
    assert last.stop() == 0


def test_kill_during_a_put_or_a_read_leaves_no_wrong_page(children: list[KvstoreProcess], tmp_path: Path) -> None:
    flags = ("--disk-path", str(tmp_path))
    first = start(children, *flags)
    with Connection(first.address) as connection:
        put(connection, A)
        on_disk(connection, 16)
        lookup = connection.client.lookup(A)
        reading = connection.client.get_pages(lookup.lease)
        next(reading)
        with pytest.raises(Unavailable):

            def killing(index: int) -> bytes:
                if index == 5:
                    first.kill()
                return body(B, index, PAGE_BYTES)

            connection.client.put_pages(B, "uint8", PAGE_BYTES, killing)
        with contextlib.suppress(QuireError):  # what had left already may still arrive
            for index, page in reading:
                assert bytes(check_page(page, A.key(index))) == body(A, index, PAGE_BYTES)
    second = start(children, *flags)
    with Connection(second.address) as connection:
        with pytest.raises(NotFound):
            connection.client.renew(lookup.lease)
        with pytest.raises(NotFound):
            list(connection.client.get_pages(lookup.lease))
        assert connection.client.release(lookup.lease) == 0, "releasing what is of another life does no harm"
        assert found(connection, B) == (0, ""), "what was not committed never was"
        assert found(connection, A) == (16, "disk")
        at_rest(connection)
    assert second.stop() == 0


@pytest.mark.parametrize("name", deep_after(2, ["flipped", "truncated", "foreign", "swapped"]))
def test_page_file_damage_between_runs_is_noticed(children: list[KvstoreProcess], tmp_path: Path, name: str) -> None:
    flags = ("--disk-path", str(tmp_path))
    first = start(children, *flags)
    with Connection(first.address) as connection:
        put(connection, A)
        on_disk(connection, 16)
    first.kill()
    files = sorted(tmp_path.rglob("*.page"))
    assert len(files) == 16
    if name == "flipped":
        with files[0].open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))
    elif name == "truncated":
        os.truncate(files[0], PAGE_BYTES // 2)
    elif name == "swapped":
        files[0].write_bytes(files[1].read_bytes())
    else:
        files[0].write_bytes(os.urandom(PAGE_BYTES))
        (tmp_path / "README").write_text("not a page")
    second = start(children, *flags)
    with Connection(second.address) as connection:
        pages, _ = found(connection, A)
        assert pages < 16
        assert connection.tier("disk").corrupt == 1
        assert put(connection, A) >= 1
        assert found(connection, A)[0] == 16
        on_disk(connection, 16)
        at_rest(connection)
    assert second.stop() == 0


@pytest.mark.deep
def test_full_or_missing_disk_is_survived(children: list[KvstoreProcess], tmp_path: Path) -> None:
    """A file size limit makes every write fail in the kernel; a path through a file can be opened by nobody."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "full", tmp_path / "file" / "x"):
        child = start(children, "--disk-path", str(folder), "--disk-retry-s", "0.1")
        resource.prlimit(child.child.pid, resource.RLIMIT_FSIZE, (PAGE_BYTES // 2, PAGE_BYTES // 2))
        with Connection(child.address) as connection:
            assert put(connection, A) == 16
            assert found(connection, A) == (16, "ram")
            eventually(lambda connection=connection: connection.tier("disk").dropped >= 16)  # type: ignore[misc]  # bound early
            disk = connection.tier("disk")
            assert (disk.pages, disk.available) == (0, False) and disk.errors >= 1
            assert found(connection, A) == (16, "ram")
            at_rest(connection)
        assert child.stop() == 0
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


@pytest.mark.deep
def test_kvstore_serves_while_redis_goes_and_comes(children: list[KvstoreProcess], redis_server: RedisServer) -> None:
    flags = ("--redis-url", redis_server.url, "--redis-retry-s", "0.1", "--redis-timeout-ms", "2000")
    first, second = start(children, *flags), start(children, *flags)
    with Connection(first.address) as one, Connection(second.address) as two:
        eventually(lambda: one.tier("redis").available and two.tier("redis").available)
        assert put(one, A) == 16
        eventually(lambda: one.tier("redis").stored == 16)
        assert found(two, A) == (16, "redis")
        redis_server.stop()
        started = time.monotonic()
        assert put(one, B) == 16 and found(one, B) == (16, "ram") and found(two, B) == (0, "")
        assert time.monotonic() - started < 20
        eventually(lambda: not two.tier("redis").available and one.tier("redis").dropped == 16)
        redis_server.start()
        eventually(lambda: one.tier("redis").available and two.tier("redis").available)
        assert found(two, B) == (0, "") and put(two, B) == 16 and found(two, B) == (16, "ram")
        at_rest(one)
        at_rest(two)
    assert first.stop() == 0 and second.stop() == 0


@pytest.mark.deep
def test_waiting_lookups_leave_threads_for_others(children: list[KvstoreProcess]) -> None:
    """A Redis that accepts and never answers: lookups wait their time, renewals and statistics do not."""
    with contextlib.ExitStack() as stack:
        server = RedisServer()
        stack.callback(server.close)
        server.start()
        child = start(children, "--redis-url", server.url, "--redis-timeout-ms", "60000", "--max-prefetches", "4")
        connections = [stack.enter_context(Connection(child.address)) for _ in range(3)]
        eventually(lambda: connections[0].tier("redis").available)
        put(connections[0], A)
        lease = connections[0].client.lookup(part(A, 0, 4)).lease
        eventually(lambda: connections[0].tier("redis").stored == 16)
        server.freeze()
        waiting = [
            connections[n % 3].stub.LookupAndPin.future(
                kvstore_pb2.LookupAndPinRequest(
                    keys=kvstore_pb2.PageKeys(namespace=B.namespace, hashes=chain(f"cold {n}", 3).hashes)
                ),
                timeout=6,
            )
            for n in range(40)
        ]
        for _ in range(20):
            assert connections[0].client.renew(lease, 60_000) > 0
            assert connections[1].tier("ram").pages == 16
        answers = [call.result() for call in waiting]
        assert all(answer.pages == 0 for answer in answers), "each has its answer in its time"
        assert connections[0].client.release(lease) == 1
        server.thaw()
        at_rest(connections[0])
        assert child.stop() == 0
