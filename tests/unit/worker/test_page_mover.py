"""Page moves through a carrier: order, checks, bounds, and the end of a run in mid-move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from quire_common.credit import KvGroup, MoveKind, PageMove
from quire_common.errors import NotFound
from quire_common.kv_client import KvClient, PutOutcome
from quire_common.pages import PageKey, PageRun, frame_page
from quire_worker.engine.moves import MoveResult
from quire_worker.engine.page_mover import KvStoreCarrier, PageMover
from tests.fakes.counting_runner import EMPTY, CountingRunner
from tests.fakes.engine_bench import ids

WAIT_S = 30.0
NAMESPACE = b"n" * 32
GROUP = KvGroup("full", 16, "token", "int32", 1, 1, 1)


def digest(index: int) -> bytes:
    return bytes([index]) * 32


def a_move(move_id: int, kind: MoveKind, *pages: int) -> PageMove:
    return PageMove(move_id, kind, 0, ids(*pages), tuple(digest(page) for page in pages), b"lease")


Spoil = Callable[[bytes], bytes]


def intact(framed: bytes) -> bytes:
    return framed


class Store:
    """The client's side of a kvstore, in a dictionary. `gate` holds calls up; `spoil` changes what is sent."""

    def __init__(self) -> None:
        self.framed: dict[bytes, bytes] = {}
        self.spoil: dict[int, Spoil] = {}
        self.order: Callable[[list[int]], list[int]] = lambda indices: indices
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.leases = {b"lease": [digest(page) for page in range(1, 5)]}

    def get_pages(self, lease: bytes, indices: range, *, context: object) -> Iterator[tuple[int, bytes]]:
        if lease not in self.leases:
            raise NotFound("LEASE_UNKNOWN", "m", "f")
        for index in self.order(list(indices)):
            self._wait_at_gate()
            yield index, self.spoil.get(index, intact)(self.framed[self.leases[lease][index]])

    def put_pages(
        self, run: PageRun, dtype: str, page_bytes: int, body: Callable[[int], bytes], *, context: object
    ) -> PutOutcome:
        wanted = [i for i in range(len(run)) if run.hashes[i] not in self.framed]
        self._wait_at_gate()
        bodies = [body(index) for index in wanted]
        for index, data in zip(wanted, bodies, strict=True):
            self.framed[run.hashes[index]] = frame_page(run.key(index), dtype, data) + data
        return PutOutcome(len(wanted), len(wanted), 0)

    def _wait_at_gate(self) -> None:
        gate = self.gate
        self.reached.set()
        assert gate.wait(WAIT_S)


class Bench:
    def __init__(self, max_queued: int = 8) -> None:
        self.store = Store()
        self.pool = CountingRunner(16, 4, 97)
        for page in range(1, 5):
            self.pool.pages[page] = page
        carrier = KvStoreCarrier(cast(KvClient, self.store), NAMESPACE, GROUP)
        self.mover = PageMover(carrier, self.pool, max_queued)
        self.woken = threading.Semaphore(0)
        self.mover.wake = self.woken.release

    def do(self, move: PageMove) -> MoveResult:
        assert self.mover.submit(move)
        return self.result()

    def result(self) -> MoveResult:
        (result,) = self.results(1)
        return result

    def results(self, count: int) -> list[MoveResult]:
        for _ in range(count):
            assert self.woken.acquire(timeout=WAIT_S)
        return self.mover.finished()

    def stored(self) -> None:
        assert self.do(a_move(1, MoveKind.STORE, 1, 2, 3, 4)).ok
        self.store.reached.clear()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.gate.set()
    made.mover.close()


def pages_of(bench: Bench, *pages: int) -> list[list[int]]:
    return [bench.pool.pages[page].tolist() for page in pages]


def a_load(move_id: int, *targets: int) -> PageMove:
    """Bring the lease's first pages to the targets."""
    hashes = tuple(digest(page) for page in range(1, 1 + len(targets)))
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*targets), hashes, b"lease")


def test_store_then_load_brings_the_same_bytes(bench: Bench) -> None:
    bench.stored()
    result = bench.do(a_load(2, 11, 12, 13))
    assert (result.id, result.ok, result.pages) == (2, True, 3)
    assert pages_of(bench, 11, 12, 13) == [[1] * 4, [2] * 4, [3] * 4]


def test_pages_that_the_store_has_already_count_as_stored(bench: Bench) -> None:
    bench.stored()
    result = bench.do(a_move(2, MoveKind.STORE, 1, 2))
    assert (result.ok, result.pages) == (True, 2)


def other_key(framed: bytes) -> bytes:
    body = framed[-16:]
    return frame_page(PageKey(NAMESPACE, b"x" * 32), "int32", body) + body


def other_dtype(framed: bytes) -> bytes:
    body = framed[-16:]
    return frame_page(PageKey(NAMESPACE, digest(2)), "float32", body) + body


@pytest.mark.parametrize(
    "spoil",
    [
        lambda framed: framed[:-1] + b"\xff",
        lambda framed: framed[:-1],
        lambda framed: framed[:10],
        lambda framed: b"",
        other_key,
        other_dtype,
    ],
)
def test_a_wrong_page_ends_the_load_and_is_never_written(bench: Bench, spoil: Spoil) -> None:
    bench.stored()
    bench.store.spoil[1] = spoil
    result = bench.do(a_load(2, 11, 12, 13))
    assert (result.ok, result.pages) == (False, 1)
    assert pages_of(bench, 11, 12, 13) == [[1] * 4, [EMPTY] * 4, [EMPTY] * 4]


def test_pages_out_of_order_end_the_load(bench: Bench) -> None:
    bench.stored()
    bench.store.order = lambda indices: [0, 2, 1]
    assert (bench.do(a_load(2, 11, 12, 13)).pages, pages_of(bench, 13)) == (1, [[EMPTY] * 4])


def test_a_lost_lease_or_a_crash_fails_the_move_alone(bench: Bench) -> None:
    bench.stored()
    bench.store.leases = {}
    result = bench.do(a_load(2, 11))
    assert (result.id, result.ok, result.pages) == (2, False, 0)
    bench.store.leases = {b"lease": [b"gone" * 8]}
    assert not bench.do(a_load(3, 11)).ok  # a KeyError in the store's stead
    bench.store.leases = {b"lease": [digest(1)]}
    assert bench.do(a_load(4, 11)).ok


def test_a_move_is_reported_even_where_its_span_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its thread would end, and every later load would be waited for in vain."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("tracing is broken")

    bench.stored()
    monkeypatch.setattr("quire_worker.engine.page_mover.record_span", broken)
    assert bench.do(a_load(2, 5, 6)).ok
    assert bench.do(a_load(3, 7, 8)).ok


def test_a_full_queue_refuses_and_loads_do_not_wait_for_stores() -> None:
    bench = Bench(max_queued=1)
    try:
        bench.stored()
        gate, bench.store.gate = bench.store.gate, threading.Event()
        assert bench.mover.submit(a_move(2, MoveKind.STORE, 1))
        assert bench.store.reached.wait(WAIT_S)
        closed, bench.store.gate = bench.store.gate, gate
        assert bench.mover.submit(a_move(3, MoveKind.STORE, 2))
        assert not bench.mover.submit(a_move(4, MoveKind.STORE, 3))
        assert bench.do(a_load(5, 11)).ok
        closed.set()
        assert {result.id for result in bench.results(2)} == {2, 3}
    finally:
        bench.mover.close()


def test_kinds_that_it_does_not_know_are_refused(bench: Bench) -> None:
    assert not bench.mover.submit(a_move(1, MoveKind.PULL, 1))
    assert not bench.mover.submit(a_move(1, MoveKind.COPY, 1))


@pytest.mark.parametrize("kind", [MoveKind.LOAD, MoveKind.STORE])
def test_after_a_cancel_no_page_is_touched(bench: Bench, kind: MoveKind) -> None:
    bench.stored()
    if kind == MoveKind.STORE:
        bench.store.framed.clear()
    bench.store.gate.clear()
    assert bench.mover.submit(a_load(2, 11, 12) if kind == MoveKind.LOAD else a_move(2, kind, 1, 2))
    assert bench.store.reached.wait(WAIT_S)
    bench.mover.cancel()
    bench.store.gate.set()
    again = a_move(3, MoveKind.STORE, 4) if kind == MoveKind.STORE else a_load(3, 13)
    assert bench.do(again).id == 3
    assert pages_of(bench, 11, 12) == [[EMPTY] * 4] * 2
    if kind == MoveKind.STORE:
        assert list(bench.store.framed) == [digest(4)]


def test_close_ends_the_threads_even_with_full_queues() -> None:
    bench = Bench(max_queued=1)
    bench.store.gate.clear()
    assert bench.mover.submit(a_move(1, MoveKind.STORE, 1))
    assert bench.store.reached.wait(WAIT_S)
    bench.mover.submit(a_move(2, MoveKind.STORE, 2))
    bench.store.gate.set()
    bench.mover.close()
    threads: list[Any] = bench.mover._threads
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
