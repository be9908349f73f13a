"""The kvstore's carrier, and a lane that outlives what breaks in its moves."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence
from typing import cast

import pytest

from quire_common.credit import MoveKind, PageMove
from quire_common.errors import NotFound
from quire_common.kv_client import KvClient, PutOutcome
from quire_common.pages import PageKey, PageRun, frame_page
from quire_worker.mover.carrier import KvStoreCarrier
from quire_worker.mover.lanes import Job, LoadLane, StoreLane
from quire_worker.mover.ring import Ring
from quire_worker.mover.wire import Frame, Kind
from tests.fakes.engine_bench import ids
from tests.fakes.mover_rig import NAMESPACE, PAGE_BYTES, WAIT_S, body, digest

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

    def get_pages(self, lease: bytes, indices: range, *, context: object) -> Generator[tuple[int, bytes], None, None]:
        try:
            if lease not in self.leases:
                raise NotFound("LEASE_UNKNOWN", "m", "f")
            for index in self.order(list(indices)):
                framed = self.framed[self.leases[lease][index]]
                yield index, self.spoil.get(index, intact)(framed)
        finally:
            self.closed += 1

    def put_pages(
        self, run: PageRun, dtype: str, page_bytes: int, read: Callable[[int], bytes], *,
        on_wanted: Callable[[Sequence[int]], None], context: object,
    ) -> PutOutcome:  # fmt: skip
        wanted = [i for i in range(len(run)) if run.hashes[i] not in self.framed]
        on_wanted(wanted)
        for index in wanted:
            self.framed[run.hashes[index]] = frame_page(run.key(index), dtype, data := read(index)) + data
        return PutOutcome(len(wanted), len(wanted) - 1, 1)


class Written:
    def __init__(self) -> None:
        self.pages: list[tuple[int, bytes]] = []

    def __call__(self, index: int, data: memoryview) -> None:
        self.pages.append((index, bytes(data)))


def carrier(store: Store) -> KvStoreCarrier:
    return KvStoreCarrier(cast(KvClient, store), NAMESPACE, "int32", PAGE_BYTES)


def a_load(*numbers: int, lease: bytes = b"lease", move_id: int = 1) -> PageMove:
    hashes = tuple(digest(number) for number in numbers)
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*numbers), hashes, lease)


def test_a_load_brings_the_leases_first_pages() -> None:
    store, written = Store(1, 2, 3), Written()
    assert carrier(store).load(a_load(1, 2), written) == 2
    assert written.pages == [(0, body(1)), (1, body(2))] and store.closed == 1


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
def test_a_wrong_page_ends_the_load(spoil: Spoil) -> None:
    store, written = Store(1, 2, 3), Written()
    store.spoil[1] = spoil
    assert carrier(store).load(a_load(1, 2, 3), written) == 1
    assert written.pages == [(0, body(1))] and store.closed == 1


def test_pages_out_of_order_end_the_load() -> None:
    store, written = Store(1, 2, 3), Written()
    store.order = lambda indices: [0, 2, 1]
    assert carrier(store).load(a_load(1, 2, 3), written) == 1 and len(written.pages) == 1


def test_a_lost_lease_is_a_miss() -> None:
    assert carrier(Store(1)).load(a_load(1, lease=b"gone"), Written()) == 0


def test_a_store_asks_for_what_is_wanted_and_counts_what_is_kept() -> None:
    store, wanted = Store(1), list[int]()
    move = PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3), (digest(1), digest(2), digest(3)))
    stored = carrier(store).store(move, wanted.extend, lambda index: memoryview(body(index + 1)))
    assert wanted == [1, 2] and stored == 2  # of the two that were wanted, one was refused
    assert store.framed[digest(3)].endswith(body(3))


def test_a_lane_goes_on_whatever_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every later load would be waited for in vain."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("tracing is broken")

    monkeypatch.setattr("quire_worker.mover.lanes.record_span", broken)
    store, ring = Store(1), Ring.create(PAGE_BYTES, 2)
    store.leases[b"bad"] = [b"no such page"]
    sent: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    lane = LoadLane(carrier(store), ring, sent.put, [0])
    try:
        lane.put(Job(a_load(1, lease=b"bad", move_id=1), 0, 0))  # a KeyError in the store's stead
        lane.put(Job(a_load(1, move_id=2), 0, 0))
        frames = [sent.get(timeout=WAIT_S) for _ in range(3)]
        assert [(frame.kind, frame.move, frame.numbers()) for frame in frames] == [
            (Kind.ENDED, 1, [0]), (Kind.ARRIVED, 2, [0, 0]), (Kind.ENDED, 2, [1]),
        ]  # fmt: skip
        assert bytes(ring.slot(0)) == body(1)
    finally:
        lane.close()
        ring.close()


class HalfStore:
    """Wants all pages and fails after the first."""

    def store(self, move: PageMove, want: Callable[[Sequence[int]], None], read: Callable[[int], memoryview]) -> int:
        want(range(len(move.hashes)))
        assert bytes(read(0)) == body(1)
        raise NotFound("LEASE_UNKNOWN", "m", "f")

    def load(self, move: PageMove, write: Callable[[int, memoryview], None]) -> int:
        raise AssertionError("this is the other lane's")


def test_a_store_that_fails_gives_back_every_slot_also_of_pages_that_come_later() -> None:
    ring, sent = Ring.create(PAGE_BYTES, 4), queue.SimpleQueue[Frame]()
    lane = StoreLane(HalfStore(), ring, sent.put)
    try:
        lane.put(Job(PageMove(1, MoveKind.STORE, 0, ids(1, 2, 3), (digest(1), digest(2), digest(3))), 5, 0))
        assert sent.get(timeout=WAIT_S).numbers() == [0, 1, 2]
        ring.slot(2)[:] = body(1)
        lane.filled(5, 1, [(0, 2), (1, 3)])
        released, ended = sent.get(timeout=WAIT_S), sent.get(timeout=WAIT_S)
        assert (released.kind, sorted(released.numbers())) == (Kind.RELEASED, [2, 3])
        assert (ended.kind, ended.generation, ended.numbers()) == (Kind.ENDED, 5, [0])
        lane.filled(5, 1, [(2, 2)])
        late = sent.get(timeout=WAIT_S)
        assert (late.kind, late.numbers()) == (Kind.RELEASED, [2])
    finally:
        lane.close()
        ring.close()
