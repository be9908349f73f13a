"""The kvstore's carrier, and a lane that outlives what breaks in its moves."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Generator, Iterator
from typing import cast

import pytest

from bench.harness.plain_pages import PlainPageSink, PlainPageSource, ids
from quire_common.credit import MoveKind, PageMove
from quire_common.errors import NotFound, QuireError, Unavailable, Unsupported
from quire_common.kv.kv_client import KvClient, LeaseAccess, PutOutcome, StartedPut
from quire_common.pages import PageKey, PageRun, frame_page
from quire_worker.kv_transfer.job_queue import Job
from quire_worker.kv_transfer.kv_connector import KvStoreConnector
from quire_worker.kv_transfer.kvstore_queues import LoadQueue, StoreQueue
from quire_worker.kv_transfer.ring import Ring
from quire_worker.kv_transfer.transports import data_link
from quire_worker.kv_transfer.transports.grpc_transport import GrpcTransport
from quire_worker.kv_transfer.transports.transport import PageSink, PageSource
from quire_worker.kv_transfer.transports.transport_selector import TransportSelector
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame
from tests.fakes.kv_transfer.agent_rig import NAMESPACE, PAGE_BYTES, WAIT_S, body, digest

Spoil = Callable[[bytes], bytes]


def intact(framed: bytes) -> bytes:
    return framed


class Store:
    """The client's side of a kvstore, in a dictionary. `spoil` changes what is sent."""

    def __init__(self, *numbers: int) -> None:
        self.framed = {
            digest(n): frame_page(PageKey(NAMESPACE, digest(n)), "int32", body(n)) + body(n) for n in numbers
        }
        self.spoil: dict[int, Spoil] = {}
        self.order: Callable[[list[int]], list[int]] = lambda indices: indices
        self.leases = {b"lease": [digest(n) for n in numbers]}
        self.closed = 0
        self.checked: list[int] = []
        self.checks: QuireError | None = None
        """What a check fails with."""
        self.refuses: list[bytes] = []
        self.limits_s: list[float] = []
        """The time limits of the streams."""

    def get_pages(
        self, lease: bytes, indices: range, *, timeout_s: float, context: object
    ) -> Generator[tuple[int, bytes], None, None]:
        self.limits_s.append(timeout_s)
        try:
            if lease not in self.leases:
                raise NotFound("LEASE_UNKNOWN", "m", "f")
            for index in self.order(list(indices)):
                framed = self.framed[self.leases[lease][index]]
                yield index, self.spoil.get(index, intact)(framed)
        finally:
            self.closed += 1

    def check(self, lease: bytes, index: int, context: object) -> bool:
        self.checked.append(index)
        if self.checks is not None:
            raise self.checks
        return False

    def begin_put(self, run: PageRun, page_bytes: int, *, context: object) -> StartedPut:
        return StartedPut([i for i in range(len(run)) if run.hashes[i] not in self.framed], LeaseAccess(b"put"))

    @contextlib.contextmanager
    def committing(self, begun: StartedPut, context: object) -> Iterator[list[PutOutcome]]:
        outcome: list[PutOutcome] = []
        yield outcome
        refused = [hash_ for hash_ in self.refuses if self.framed.pop(hash_, None)]
        outcome.append(PutOutcome(len(begun.wanted), len(begun.wanted) - len(refused), len(refused)))

    def send_pages(
        self, lease: bytes, run: PageRun, dtype: str, indices: list[int], read: Callable[[int], memoryview], *,
        timeout_s: float, context: object, mac: object,
    ) -> None:  # fmt: skip
        assert lease == b"put"
        self.limits_s.append(timeout_s)
        for index in indices:
            data = bytes(read(index))
            self.framed[run.hashes[index]] = frame_page(run.key(index), dtype, data) + data


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring.create(PAGE_BYTES, 4)
    yield made
    made.close()


def connector(store: Store) -> KvStoreConnector:
    client = cast(KvClient, store)
    transports = TransportSelector([GrpcTransport(client)], lambda: LeaseAccess(b""))
    return KvStoreConnector(client, transports, NAMESPACE, "int32", PAGE_BYTES)


def a_load(*numbers: int, lease: bytes = b"lease", move_id: int = 1) -> PageMove:
    hashes = tuple(digest(number) for number in numbers)
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*numbers), hashes, lease)


def test_a_load_brings_the_leases_first_pages(ring: Ring) -> None:
    store, sink = Store(1, 2, 3), PlainPageSink(ring)
    carries = connector(store)
    assert carries.load(a_load(1, 2), sink) == 2
    assert sink.bodies() == [body(1), body(2)] and store.closed == 1
    assert carries.transport == "grpc"


def test_time_limit_of_a_stream_grows_with_its_pages(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_link, "FLOOR_BYTES_PER_S", PAGE_BYTES / 100)
    store, page_source = Store(1, 2, 3), PlainPageSource(ring)
    connector(store).load(a_load(1, 2), PlainPageSink(ring))
    move = PageMove(1, MoveKind.STORE, 0, ids(4, 5, 6), tuple(digest(n) for n in (4, 5, 6)))
    connector(store).store(move, page_source)
    assert store.limits_s == [data_link.FRAME_S + 200, data_link.FRAME_S + 300]


def other_key(framed: bytes) -> bytes:
    return frame_page(PageKey(NAMESPACE, b"x" * 32), "int32", body(2)) + body(2)


def other_dtype(framed: bytes) -> bytes:
    return frame_page(PageKey(NAMESPACE, digest(2)), "float32", body(2)) + body(2)


def other_length(framed: bytes) -> bytes:
    return frame_page(PageKey(NAMESPACE, digest(2)), "int32", b"short") + b"short"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda framed: framed[:-1] + b"\xff",
        lambda framed: framed[:-1],
        lambda framed: framed[:10],
        lambda framed: b"",
        other_key,
        other_dtype,
        other_length,
    ],
)
def test_a_wrong_page_ends_the_load_and_the_store_is_told(ring: Ring, spoil: Spoil) -> None:
    store, sink = Store(1, 2, 3), PlainPageSink(ring)
    store.spoil[1] = spoil
    assert connector(store).load(a_load(1, 2, 3), sink) == 1
    assert sink.bodies() == [body(1)] and store.closed == 1
    assert store.checked == [1]


@pytest.mark.parametrize("error", [Unsupported("UNIMPLEMENTED", "m", "f"), Unavailable("UNAVAILABLE", "m", "f")])
def test_a_store_that_cannot_be_told_of_a_wrong_page_is_a_miss_as_well(ring: Ring, error: QuireError) -> None:
    store, sink = Store(1, 2, 3), PlainPageSink(ring)
    store.spoil[1], store.checks = other_key, error
    assert connector(store).load(a_load(1, 2, 3), sink) == 1 and store.checked == [1]


def test_pages_out_of_order_end_the_load(ring: Ring) -> None:
    store, sink = Store(1, 2, 3), PlainPageSink(ring)
    store.order = lambda indices: [0, 2, 1]
    assert connector(store).load(a_load(1, 2, 3), sink) == 1 == sink.received_pages


def test_a_lost_lease_is_a_miss(ring: Ring) -> None:
    assert connector(Store(1)).load(a_load(1, lease=b"gone"), PlainPageSink(ring)) == 0


def test_a_store_asks_for_what_is_wanted_and_counts_what_is_kept(ring: Ring) -> None:
    store, page_source = Store(1), PlainPageSource(ring)
    store.refuses = [digest(3)]
    for number in (1, 2, 3, 4):
        ring.slot(number - 1)[:] = body(number)
    move = PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3, 4), tuple(digest(n) for n in (1, 2, 3, 4)))
    stored = connector(store).store(move, page_source)
    assert stored == 2, "up to the one that is refused, also the second time"
    assert page_source.sent == [1, 2, 3, 2] and not page_source.remaining
    assert store.framed[digest(4)].endswith(body(4)) and digest(3) not in store.framed


class NarrowStore(Store):
    """Has room for `at_once` pages under way, and for `most` in all."""

    def __init__(self, at_once: int, most: int) -> None:
        super().__init__()
        self.at_once, self.most = at_once, most

    def begin_put(self, run: PageRun, page_bytes: int, *, context: object) -> StartedPut:
        missing = super().begin_put(run, page_bytes, context=context).wanted
        wanted = missing[: min(self.at_once, self.most - len(self.framed))]
        admitted = missing[len(wanted)] if len(wanted) < len(missing) else len(run)
        return StartedPut(wanted, LeaseAccess(b"put"), admitted)

    @contextlib.contextmanager
    def committing(self, begun: StartedPut, context: object) -> Iterator[list[PutOutcome]]:
        outcome: list[PutOutcome] = []
        yield outcome
        outcome.append(PutOutcome(len(begun.wanted), len(begun.wanted), 0))


@pytest.mark.parametrize(("at_once", "most", "stored"), [(1, 9, 4), (3, 9, 4), (2, 3, 3), (4, 0, 0)])
def test_pages_without_room_are_put_after_the_others_or_not_counted(
    ring: Ring, at_once: int, most: int, stored: int
) -> None:
    store, page_source = NarrowStore(at_once, most), PlainPageSource(ring)
    move = PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3, 4), tuple(digest(n) for n in (1, 2, 3, 4)))
    assert connector(store).store(move, page_source) == stored == len(store.framed)
    assert page_source.sent == list(range(stored))


def test_a_lane_goes_on_whatever_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every later load would be waited for in vain."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("tracing is broken")

    monkeypatch.setattr("quire_worker.kv_transfer.job_queue.record_span", broken)
    store, ring = Store(1), Ring.create(PAGE_BYTES, 2)
    store.leases[b"bad"] = [b"no such page"]
    sent: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    lane = LoadQueue(connector(store), ring, sent.put, [0])
    try:
        lane.start_job(Job(a_load(1, lease=b"bad", move_id=1), 0, 0))  # a KeyError in the store's stead
        lane.start_job(Job(a_load(1, move_id=2), 0, 0))
        frames = [sent.get(timeout=WAIT_S) for _ in range(3)]
        assert [(frame.kind, frame.subject, frame.numbers()) for frame in frames] == [
            (AgentFrameKind.ENDED, 1, [0, 0]), (AgentFrameKind.ARRIVED, 2, [0, 0]), (AgentFrameKind.ENDED, 2, [1, 3]),
        ]  # fmt: skip
        assert bytes(ring.slot(0)) == body(1)
    finally:
        lane.close()
        ring.close()


class HalfStore:
    """Wants all pages and fails after the first."""

    transport = ""

    def store(self, move: PageMove, page_source: PageSource) -> int:
        page_source.request_pages(range(len(move.hashes)))
        assert bytes(page_source.page_body(0)) == body(1)
        raise NotFound("LEASE_UNKNOWN", "m", "f")

    def load(self, move: PageMove, sink: PageSink) -> int:
        raise AssertionError("this is the other lane's")


def test_a_store_that_fails_gives_back_every_slot_also_of_pages_that_come_later() -> None:
    ring, sent = Ring.create(PAGE_BYTES, 4), queue.SimpleQueue[Frame]()
    lane = StoreQueue(HalfStore(), ring, sent.put)
    try:
        lane.start_job(Job(PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3), (digest(1), digest(2), digest(3))), 5, 0))
        assert sent.get(timeout=WAIT_S).numbers() == [0, 1, 2]
        ring.slot(2)[:] = body(1)
        lane.filled(5, 1, [(0, 2), (1, 3)])
        released, ended = sent.get(timeout=WAIT_S), sent.get(timeout=WAIT_S)
        assert (released.kind, sorted(released.numbers())) == (AgentFrameKind.RELEASED, [2, 3])
        assert (ended.kind, ended.generation, ended.numbers()) == (AgentFrameKind.ENDED, 5, [0, 0])
        lane.filled(5, 1, [(2, 2)])
        late = sent.get(timeout=WAIT_S)
        assert (late.kind, late.numbers()) == (AgentFrameKind.RELEASED, [2])
    finally:
        lane.close()
        ring.close()
