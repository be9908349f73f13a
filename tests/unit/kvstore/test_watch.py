"""The Watch stream, frame by frame: its handler's generator is driven here, so that being slow is exact."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from quire.v1 import common_pb2
from quire_common.kv.page_events import FRAME_PAGES
from quire_kvstore.page_store import PageStore
from quire_kvstore.servicer import KvStoreServicer
from quire_kvstore.stream_limiter import StreamLimiter
from tests.unit.kvstore.pages import chain, config, part, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

A, B = chain("a", 8), chain("b", 8)
EPOCH = common_pb2.Epoch(boot_id=7, run=1)


class Context:
    """What the handler uses of grpc's."""

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.active


@pytest.fixture
def store() -> Iterator[PageStore]:
    made = PageStore(config(16, watch_queue=3, max_keys=20_000))
    yield made
    made.check_integrity()
    made.close()


def watch(store: PageStore, context: Context | None = None, **request: Any) -> Iterator[common_pb2.PageEvents]:
    servicer = KvStoreServicer(store, StreamLimiter(1, 1), EPOCH)
    handler: Any = servicer.Watch
    events: Iterator[common_pb2.PageEvents] = handler(common_pb2.WatchPagesRequest(**request), context or Context())
    return events


def hashes(event: common_pb2.PageEvents) -> set[bytes]:
    return {digest for stored in event.stored for digest in stored.hashes}


def test_a_slow_watcher_takes_a_new_snapshot_and_goes_on_from_it(store: PageStore) -> None:
    events = watch(store)
    assert next(events).snapshot_complete
    for index in range(3):
        put(store, part(A, 0, index + 1))
        assert next(events).sequence == index + 1
    for index in range(3, 8):  # five changes, and the tail holds three
        put(store, part(A, 0, index + 1))
    again = next(events)
    assert again.snapshot and again.snapshot_complete and again.sequence == 8
    assert hashes(again) == set(A.hashes)
    put(store, part(B, 0, 1))
    tail = next(events)
    assert not tail.snapshot and tail.sequence == 9 and hashes(tail) == {B.hashes[0]}


def test_who_resumes_gets_the_tail_alone_and_joined(store: PageStore) -> None:
    for index in range(3):
        put(store, part(A, 0, index + 1))
    frame = next(watch(store, epoch=EPOCH, after_sequence=1))
    assert not frame.snapshot and (frame.first_sequence, frame.sequence) == (2, 3)
    assert [(s.parent, list(s.hashes)) for s in frame.stored] == [(A.hashes[0], list(A.hashes[1:3]))]
    current = watch(store, epoch=EPOCH, after_sequence=3)
    assert next(current) == common_pb2.PageEvents(epoch=EPOCH, sequence=3), "nothing was missed"
    put(store, part(A, 0, 5))
    assert next(current).sequence == 4
    other = common_pb2.Epoch(boot_id=7, run=2)
    for stale in ({"epoch": EPOCH, "after_sequence": 0}, {"epoch": EPOCH, "after_sequence": 9}, {"epoch": other}):
        again = next(watch(store, **stale))
        assert again.snapshot_complete and again.sequence == 4 and hashes(again) == set(A.hashes[:5])


def test_a_watcher_may_ask_for_fewer_frames(store: PageStore) -> None:
    events, began_s = watch(store, interval_ms=100), time.monotonic()
    assert next(events).snapshot_complete
    for index in range(3):
        put(store, part(A, 0, index + 1))
    frame = next(events)
    assert (frame.first_sequence, frame.sequence) == (1, 3) and 0 < frame.age_us < 60e6
    assert time.monotonic() - began_s >= 0.1


def test_a_snapshot_comes_in_bounded_frames() -> None:
    count = 2 * FRAME_PAGES + 1
    store = PageStore(config(count, max_keys=count, max_pending_bytes=1 << 30))
    run = chain("many", count)
    assert put(store, run) == (count, 0)
    events = watch(store)
    frames = [next(events) for _ in range(3)]
    assert [frame.snapshot_complete for frame in frames] == [False, False, True]
    assert [len(hashes(frame)) for frame in frames] == [FRAME_PAGES, FRAME_PAGES, 1]
    assert set().union(*map(hashes, frames)) == set(run.hashes)
    store.check_integrity()


def test_pools_are_told_apart(store: PageStore) -> None:
    other = chain("a", 2, group=1)
    put(store, part(A, 0, 2))
    put(store, other)
    snapshot = next(watch(store))
    assert {(stored.group, tuple(sorted(stored.hashes))) for stored in snapshot.stored} == {
        (0, tuple(sorted(A.hashes[:2]))),
        (1, tuple(sorted(other.hashes))),
    }
    events = watch(store)
    next(events)
    big = chain("big", 16)
    put(store, big)
    gone = next(events).removed_pages
    assert {(removed.group, len(removed.hashes)) for removed in gone} == {(0, 2), (1, 2)}


def test_a_run_with_a_gap_is_told_in_two_parts(store: PageStore) -> None:
    put(store, part(A, 2, 4))
    events = watch(store)
    next(events)
    put(store, A)
    stored = next(events).stored
    assert [(s.parent, len(s.hashes)) for s in stored] == [(b"", 2), (A.hashes[3], 4)]


def test_a_departing_peer_ends_the_handler_and_frees_its_place(store: PageStore) -> None:
    context = Context()
    events = watch(store, context)
    next(events)
    ended = threading.Event()

    def wait() -> None:
        assert list(events) == []
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for callback in context.callbacks:
        callback()
    assert ended.wait(30)
    thread.join()
    assert store.stats().watchers == 0
    assert list(watch(store, Context(active=False))) == []
    assert store.stats().watchers == 0
