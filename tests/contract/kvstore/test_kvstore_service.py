"""The KvStore contract over a real server: what a worker, a scheduler and a router see of it."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from quire.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from quire_common.columns import pack_i32
from quire_common.errors import InvalidArgument, NotFound, Overloaded, QuireError, TooLarge, from_rpc_error
from quire_common.kv.kv_client import AioKvClient, KvClient
from quire_common.pages import PageRun, check_page
from quire_common.telemetry.interceptors import sync_client_interceptors, sync_server_interceptors
from quire_common.telemetry.metrics import render
from quire_common.transport import SERVER_OPTIONS
from quire_kvstore.config import KvstoreConfig
from quire_kvstore.server import KvstoreService, worker_threads
from tests.unit.kvstore.pages import BODY_BYTES, PLACE_BYTES, body, chain, config, framed, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

A, B = chain("a", 8), chain("b", 8)
BIG = 2 << 20


class Running:
    """A service on a real port, a plain stub and the client that workers use."""

    def __init__(self, service: KvstoreService, address: str, channel: grpc.Channel) -> None:
        self.service = service
        self.address = address
        self.stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)
        self.client = KvClient(channel, timeout_s=60)

    def put(self, run: PageRun) -> int:
        return self.client.put_pages(run, "uint8", BODY_BYTES, lambda index: body(run, index)).stored


@contextlib.contextmanager
def serving(settings: KvstoreConfig) -> Iterator[Running]:
    service = KvstoreService(settings)
    with futures.ThreadPoolExecutor(worker_threads(settings)) as pool:
        server = grpc.server(pool, interceptors=sync_server_interceptors(), options=SERVER_OPTIONS)
        assert service.register(server) == ["quire.v1.KvStore"]
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        service.start()
        with grpc.insecure_channel(address) as channel:
            yield Running(service, address, grpc.intercept_channel(channel, *sync_client_interceptors(address)))
        service.drain(10)
        server.stop(5).wait()
        service.store.check_integrity()
        service.close()


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(config(64, sweep_s=0.02)) as service:
        yield service


def refusal(call: Callable[[], object]) -> QuireError:
    with pytest.raises((grpc.RpcError, QuireError)) as caught:
        call()
    return caught.value if isinstance(caught.value, QuireError) else from_rpc_error(caught.value)  # type: ignore[arg-type]  # the other kind is an RpcError


def keys(run: PageRun) -> kvstore_pb2.PageKeys:
    return kvstore_pb2.PageKeys(namespace=run.namespace, group=run.group, hashes=run.hashes)


def begin(running: Running, run: PageRun, lease_ms: int = 0, page_bytes: int = BODY_BYTES) -> Any:
    return running.stub.BeginPut(kvstore_pb2.BeginPutRequest(keys=keys(run), page_bytes=page_bytes, lease_ms=lease_ms))


def frame(lease: bytes, page: int, data: bytes, offset: int = 0) -> kvstore_pb2.PutFrame:
    return kvstore_pb2.PutFrame(lease=lease, page=page, offset=offset, data=data)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within 60 s"
        time.sleep(0.01)


def test_stored_pages_come_back_byte_for_byte(running: Running) -> None:
    outcome = running.client.put_pages(A, "uint8", BODY_BYTES, lambda index: body(A, index))
    assert (outcome.wanted, outcome.stored, outcome.refused) == (8, 8, 0)
    lookup = running.client.lookup(A)
    assert (lookup.pages, lookup.medium, lookup.lease_ms) == (8, "ram", 10_000) and lookup.boot_id
    got = dict(running.client.get_pages(lookup.lease))
    assert {i: bytes(check_page(page, A.key(i), "uint8", BODY_BYTES)) for i, page in got.items()} == {
        i: body(A, i) for i in range(8)
    }
    assert [index for index, _ in running.client.get_pages(lookup.lease, [5, 2])] == [5, 2]
    assert list(running.client.get_pages(lookup.lease, [])) == []
    assert running.client.release(lookup.lease) == 1
    assert running.client.release(lookup.lease) == 0
    assert running.client.put_pages(A, "uint8", BODY_BYTES, lambda _: pytest.fail("not wanted")).wanted == 0


def test_pages_of_two_mebibytes_travel_in_frames() -> None:
    rng = np.random.default_rng(0)
    bodies = rng.standard_normal((4, BIG // 4), dtype=np.float32)
    run = part(A, 0, 4)
    with serving(KvstoreConfig(ram_bytes=32 << 20)) as running:
        assert running.client.put_pages(run, "float32", BIG, lambda index: bodies[index]).stored == 4
        lease = running.client.lookup(run).lease
        frames = list(running.stub.Get(kvstore_pb2.GetRequest(lease=lease, pages=pack_i32([3]))))
        assert [len(f.data) for f in frames] == [1 << 20, 1 << 20, 128]
        assert [f.last for f in frames] == [False, False, True]
        for index, page in running.client.get_pages(lease):
            assert np.array_equal(
                np.frombuffer(check_page(page, run.key(index), "float32", BIG), np.float32), bodies[index]
            )


def test_namespaces_and_groups_are_separate(running: Running) -> None:
    running.put(A)
    for other in (chain("a", 8, namespace=bytes(32)), chain("a", 8, group=3)):
        lookup = running.client.lookup(other)
        assert (lookup.pages, lookup.lease) == (0, b"")


def test_an_expired_lease_is_not_found_even_in_the_middle_of_a_read() -> None:
    with serving(KvstoreConfig(ram_bytes=64 << 20, sweep_s=0.02)) as running:
        run = chain("big", 12)
        data = bytes(BIG)
        running.client.put_pages(run, "uint8", BIG, lambda _: data)
        lookup = running.client.lookup(run, lease_ms=2000)
        assert lookup.lease_ms == 2000
        reading = running.client.get_pages(lookup.lease)
        assert next(reading)[0] == 0
        eventually(lambda: running.service.store.stats().leases == 0)
        error = refusal(lambda: list(reading))
        assert isinstance(error, NotFound) and error.code == "LEASE_UNKNOWN" and error.fix
        for call in (lambda: list(running.client.get_pages(lookup.lease)), lambda: running.client.renew(lookup.lease)):
            assert isinstance(refusal(call), NotFound)


def test_unknown_lease_is_not_found_by_every_call(running: Running) -> None:
    lease = b"\x00" * 16
    for call in (
        lambda: list(running.client.get_pages(lease)),
        lambda: running.client.renew(lease),
        lambda: running.stub.Put(iter([frame(lease, 0, b"x")])),
        lambda: running.stub.CommitPut(kvstore_pb2.CommitPutRequest(lease=lease)),
    ):
        error = refusal(call)
        assert isinstance(error, NotFound) and error.code == "LEASE_UNKNOWN"


def test_renewing_keeps_a_lease(running: Running) -> None:
    running.put(A)
    lookup = running.client.lookup(A, lease_ms=1500)
    assert running.client.renew(lookup.lease, 60_000) > 50_000
    time.sleep(1.7)
    assert len(list(running.client.get_pages(lookup.lease))) == 8


def test_a_client_that_dies_in_mid_put_leaves_nothing(running: Running) -> None:
    begun = begin(running, A, lease_ms=1500)
    sending = threading.Event()

    def frames() -> Iterator[kvstore_pb2.PutFrame]:
        yield frame(begun.lease, 0, framed(A, 0))
        sending.set()
        threading.Event().wait(0.2)
        yield frame(begun.lease, 1, framed(A, 1)[:100])

    call = running.stub.Put.future(frames())
    assert sending.wait(30)
    call.cancel()
    assert running.service.store.stats().pending_puts == 1
    assert running.client.lookup(A, pin=False).pages == 0
    eventually(lambda: running.service.store.stats().pending_bytes == 0)
    assert running.put(A) == 8, "the pages are wanted again"
    eventually(lambda: len(running.service._stream_limiter) == 0)


def test_a_failing_source_releases_its_put_at_once(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    def source(index: int) -> bytes:
        if index == 2:
            raise OSError("the device went away")
        return body(A, index)

    with pytest.raises(QuireError):
        running.client.put_pages(A, "uint8", BODY_BYTES, source, lease_ms=60_000)
    assert running.service.store.stats().pending_puts == 0
    assert running.put(A) == 8
    assert "the device went away" in caplog.text


def test_full_store_refuses_pinned_and_evicts_oldest_tails_first() -> None:
    with serving(config(12)) as running:
        assert running.put(part(A, 0, 6)) == 6
        assert running.put(part(B, 0, 6)) == 6
        lookup = running.client.lookup(part(A, 0, 6))
        c = chain("c", 8)
        assert running.put(c) == 6, "there is room for what B gives up, A is pinned"
        assert running.client.lookup(part(A, 0, 6), pin=False).pages == 6
        assert running.client.lookup(part(B, 0, 6), pin=False).pages == 0
        second = running.client.lookup(c)
        assert running.put(B) == 0, "all is pinned: refused, not stalled"
        running.client.release(lookup.lease, second.lease)
        assert running.put(part(B, 0, 2)) == 2
        assert running.client.lookup(part(A, 0, 6), pin=False).pages == 4, "A was released first and lost its tail"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda r: r.client.lookup(chain("x", 1, namespace=b"short")), "BAD_PAGE_KEY"),
        (lambda r: r.client.lookup(PageRun(A.namespace, 0, (b"short",))), "BAD_PAGE_KEY"),
        (lambda r: r.client.lookup(chain("x", 33)), "TOO_MANY_KEYS"),
        (lambda r: begin(r, chain("x", 33)), "TOO_MANY_KEYS"),
        (lambda r: begin(r, A, page_bytes=0), "BAD_PAGE_SIZE"),
        (lambda r: begin(r, A, page_bytes=1 << 40), "BAD_PAGE_SIZE"),
        (lambda r: begin(r, PageRun(A.namespace, 0, (A.hashes[0],) * 2)), "DUPLICATE_PAGE"),
        (lambda r: r.stub.Put(iter([])), "NO_LEASE"),
        (lambda r: r.stub.Put(iter([frame(b"", 0, b"x")])), "NO_LEASE"),
        (lambda r: r.stub.Put(iter([frame(begin(r, B).lease, 0, bytes((1 << 20) + 1))])), "BAD_PUT_FRAME"),
        (lambda r: r.stub.Put(iter([frame(begin(r, B).lease, 99, b"x")])), "BAD_PUT_FRAME"),
        (lambda r: r.stub.Put(iter([frame(begin(r, B).lease, 0, b"x", offset=7)])), "BAD_PUT_FRAME"),
        (lambda r: list(r.stub.Get(kvstore_pb2.GetRequest(lease=looked(r), pages=pack_i32([8])))), "BAD_PAGE_INDEX"),
        (lambda r: list(r.stub.Get(kvstore_pb2.GetRequest(lease=looked(r), pages=pack_i32([-1])))), "BAD_PAGE_INDEX"),
        (lambda r: list(r.stub.Get(kvstore_pb2.GetRequest(lease=looked(r), pages=b"odd"))), "BAD_COLUMN"),
    ],
)
def test_bad_input_is_a_typed_error(call: Callable[[Running], object], code: str) -> None:
    with serving(config(64, max_keys=32)) as running:
        error = refusal(lambda: call(running))
        assert isinstance(error, InvalidArgument | TooLarge) and error.code == code and error.fix
        running.put(A)
        assert running.client.lookup(A, pin=False).pages == 8, "others are unharmed"


def looked(running: Running) -> bytes:
    running.put(A)
    return running.client.lookup(A).lease


def test_leases_transfers_and_watchers_are_bounded() -> None:
    with serving(
        config(64, max_leases=2, max_transfers=1, max_watchers=1, transfer_timeout_s=2.5, sweep_s=0.02)
    ) as running:
        running.put(A)
        leases = [running.client.lookup(A).lease for _ in range(2)]
        error = refusal(lambda: running.client.lookup(A))
        assert isinstance(error, Overloaded) and error.code == "TOO_MANY_LEASES" and error.retry_after_s > 0
        running.client.release(leases[0])
        begun = begin(running, B)
        stalled = running.stub.Put.future(stall(begun.lease))
        eventually(lambda: len(running.service._stream_limiter) == 1)
        assert refusal(lambda: list(running.client.get_pages(leases[1]))).code == "TOO_MANY_TRANSFERS"
        assert isinstance(refusal(stalled.result), QuireError), "a stalled stream is cut off in the end"
        eventually(lambda: len(running.service._stream_limiter) == 0)
        assert len(list(running.client.get_pages(leases[1]))) == 8
        watching = running.stub.Watch(common_pb2.WatchPagesRequest())
        next(watching)
        assert refusal(lambda: next(running.stub.Watch(common_pb2.WatchPagesRequest()))).code == "TOO_MANY_WATCHERS"
        watching.cancel()
        eventually(lambda: running.service.store.stats().watchers == 0)


def stall(lease: bytes) -> Iterator[kvstore_pb2.PutFrame]:
    yield frame(lease, 0, framed(B, 0))
    threading.Event().wait(20)


def test_watch_sends_a_snapshot_then_the_tail() -> None:
    with serving(config(8)) as running:
        running.put(part(A, 0, 4))
        events = running.stub.Watch(common_pb2.WatchPagesRequest())
        first = next(events)
        assert first.snapshot and first.snapshot_complete and first.epoch.boot_id
        (stored,) = first.stored
        assert (stored.namespace, stored.group, stored.medium) == (A.namespace, 0, "ram")
        assert sorted(stored.hashes) == sorted(A.hashes[:4])
        keys = kvstore_pb2.PageKeys(namespace=A.namespace, hashes=B.hashes)
        missed = running.stub.LookupAndPin(kvstore_pb2.LookupAndPinRequest(keys=keys))
        assert missed.watched and missed.epoch == first.epoch, "all that it finds is told of, by that life"
        running.put(part(A, 0, 6))
        tail = next(events)
        assert not tail.snapshot and tail.sequence == first.sequence + 1
        assert list(tail.stored[0].hashes) == list(A.hashes[4:6]) and tail.stored[0].parent == A.hashes[3]
        running.put(part(B, 0, 4))
        removed, added = next(events), next(events)
        (gone,) = removed.removed_pages
        assert (gone.namespace, gone.group, list(gone.hashes)) == (A.namespace, 0, [A.hashes[5], A.hashes[4]])
        assert list(added.stored[0].hashes) == list(B.hashes[:4]) and added.stored[0].parent == b""
        assert [e.sequence - first.sequence for e in (removed, added)] == [2, 3]


def test_empty_watch_says_so_and_ends_at_drain() -> None:
    with serving(config(8)) as running:
        events = running.stub.Watch(common_pb2.WatchPagesRequest())
        assert next(events).snapshot_complete
        running.service.drain(1)
        assert list(events) == []


def test_many_clients_are_served_at_once(running: Running) -> None:
    runs = [chain(f"client {i}", 6) for i in range(6)]

    def work(number: int) -> None:
        with grpc.insecure_channel(running.address) as channel:
            client = KvClient(channel, timeout_s=60)
            for round_ in range(5):
                run = runs[(number + round_) % len(runs)]
                client.put_pages(run, "uint8", BODY_BYTES, lambda index, run=run: body(run, index))  # type: ignore[misc]  # bound early
                lookup = client.lookup(run)
                for index, page in client.get_pages(lookup.lease) if lookup.pages else ():
                    assert bytes(check_page(page, run.key(index), "uint8", BODY_BYTES)) == body(run, index)
                client.release(lookup.lease)

    with futures.ThreadPoolExecutor(6) as pool:
        for result in [pool.submit(work, number) for number in range(6)]:
            result.result(timeout=120)
    stats = running.service.store.stats()
    assert (stats.leases, stats.pending_puts) == (0, 0)


async def test_asyncio_clients_look_up_and_release(running: Running) -> None:
    running.put(A)
    async with grpc.aio.insecure_channel(running.address) as channel:
        client = AioKvClient(channel)
        lookup = await client.lookup(A, lease_ms=1000, context=common_pb2.RequestContext(request_id="r1"))
        assert lookup.pages == 8
        assert await client.renew(lookup.lease, 5000) == 5000
        assert await client.release(lookup.lease) == 1
        assert (await client.lookup(A, pin=False)).lease == b""
        with pytest.raises(NotFound):
            await client.renew(lookup.lease)
        with pytest.raises(InvalidArgument):
            await client.lookup(chain("x", 1, namespace=b"short"))


def test_absent_store_is_unavailable() -> None:
    with grpc.insecure_channel("127.0.0.1:9") as channel:
        error = refusal(lambda: KvClient(channel, timeout_s=5).lookup(A))
    assert error.code == "PEER_UNAVAILABLE"


def test_stats_and_metrics_agree(running: Running) -> None:
    running.put(A)
    lookup = running.client.lookup(A)
    running.client.lookup(B)
    stats = running.stub.Stats(kvstore_pb2.StatsRequest())
    (ram,) = stats.tiers
    assert (ram.medium, ram.pages, ram.bytes, ram.capacity_bytes) == ("ram", 8, 8 * PLACE_BYTES, 64 * PLACE_BYTES)
    assert (ram.hits, ram.misses, ram.stored, ram.corrupt, ram.evictions) == (8, 8, 8, 0, 0)
    assert (stats.leases, stats.pending_puts, stats.epoch.boot_id) == (1, 0, lookup.boot_id)
    eventually(lambda: b'quire_kvstore_pages{medium="ram"} 8.0' in render() and b"quire_kvstore_leases 1.0" in render())
