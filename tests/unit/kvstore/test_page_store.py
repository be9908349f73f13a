"""The store: what is visible when, what goes first, what is never touched. Integrity is checked after every test."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from quire_common.errors import InvalidArgument, NotFound, Overloaded, QuireError, TooLarge
from quire_common.pages import PageRun
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, chain, framed, length, part, put, read_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_kvstore.page_store import PageStore

    MakeStore = Callable[..., PageStore]

A, B, C = chain("a", 8), chain("b", 8), chain("c", 8)


def test_a_put_is_found_by_its_longest_prefix(make_store: MakeStore) -> None:
    store = make_store()
    assert put(store, part(A, 0, 5)) == (5, 0)
    assert length(store, A) == 5
    assert length(store, part(A, 0, 3)) == 3
    assert length(store, part(A, 2, 8)) == 3
    assert length(store, B) == 0
    found, lease = store.lookup(A, 0, pin=True)
    assert found == 5 and lease is not None
    for index in range(5):
        read_all(store, lease.id, A, index, step=100)


def test_the_same_hash_is_another_page_in_another_namespace_or_group(make_store: MakeStore) -> None:
    store = make_store()
    put(store, A)
    assert length(store, chain("a", 8, namespace=hashlib.sha256(b"other").digest())) == 0
    assert length(store, chain("a", 8, group=1)) == 0


def test_nothing_is_visible_before_the_commit(make_store: MakeStore) -> None:
    store = make_store()
    wanted, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert wanted == list(range(8)) and lease is not None
    for index in wanted:
        store.write(lease.id, index, 0, framed(A, index))
        assert length(store, A) == 0
    assert store.complete_pages(lease.id) == 8
    store.check_integrity()
    assert store.commit(lease.id) == (8, 0)
    assert length(store, A) == 8


def test_only_what_is_missing_is_wanted_and_by_one_put_alone(make_store: MakeStore) -> None:
    store = make_store()
    put(store, part(A, 0, 3))
    wanted, lease, _ = store.begin_put(part(A, 0, 6), BODY_BYTES, 0)
    assert wanted == [3, 4, 5] and lease is not None
    assert store.begin_put(part(A, 0, 7), BODY_BYTES, 0)[0] == [6]
    store.release([lease.id])
    assert store.begin_put(part(A, 0, 6), BODY_BYTES, 0)[0] == [3, 4, 5]
    assert store.begin_put(part(A, 0, 3), BODY_BYTES, 0)[:2] == ([], None)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("missing", b""),
        ("cut", framed(A, 1)[:-1]),
        ("another page's bytes", framed(A, 2)),
        ("flipped body", framed(A, 1)[:-1] + bytes([framed(A, 1)[-1] ^ 1])),
        ("flipped header", b"X" + framed(A, 1)[1:]),
        ("zeros", bytes(FRAMED_BYTES)),
    ],
)
def test_a_page_that_is_not_whole_and_intact_stays_invisible(make_store: MakeStore, name: str, broken: bytes) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(part(A, 0, 4), BODY_BYTES, 0)
    assert lease is not None
    for index in range(4):
        data = broken if index == 1 else framed(A, index)
        if data:
            store.write(lease.id, index, 0, data)
    assert store.commit(lease.id) == (3, 1), name
    assert length(store, A) == 1, "the prefix ends before the broken page"
    assert store.begin_put(part(A, 0, 4), BODY_BYTES, 0)[0] == [1], "and it may be put again"
    counts = store.stats().counts
    assert (counts.stored, counts.refused) == (3, 1)
    assert counts.corrupt == (0 if name in ("missing", "cut") else 1)


def test_a_page_may_be_sent_again_from_its_start(make_store: MakeStore) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(part(A, 0, 1), BODY_BYTES, 0)
    assert lease is not None
    store.write(lease.id, 0, 0, bytes(500))
    store.write(lease.id, 0, 0, framed(A, 0)[:300])
    store.write(lease.id, 0, 300, framed(A, 0)[300:])
    assert store.commit(lease.id) == (1, 0)


@pytest.mark.parametrize(
    ("index", "offset", "size", "cause"),
    [
        (9, 0, 10, "not wanted"),
        (0, 1, 10, "expected 0"),
        (0, 0, FRAMED_BYTES + 1, "up to"),
        (0, 2**63, 10, "expected 0"),
        (0, 0, (1 << 20) + 1, "more than"),
    ],
)
def test_frames_that_do_not_fit_are_refused(
    make_store: MakeStore, index: int, offset: int, size: int, cause: str
) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    with pytest.raises(InvalidArgument, match=cause):
        store.write(lease.id, index, offset, bytes(size))


def test_a_lease_is_good_for_its_own_kind_alone(make_store: MakeStore) -> None:
    store = make_store(pages=16)
    put(store, A)
    _, reading = store.lookup(A, 0, pin=True)
    _, putting, _ = store.begin_put(B, BODY_BYTES, 0)
    assert reading is not None and putting is not None
    for call in (
        lambda: store.write(reading.id, 0, 0, b"x"),
        lambda: store.commit(reading.id),
        lambda: store.complete_pages(reading.id),
        lambda: store.read(putting.id, 0, 0, 10),
        lambda: store.readable_indices(putting.id, []),
    ):
        with pytest.raises(NotFound):
            call()


def test_a_commit_happens_once(make_store: MakeStore) -> None:
    store = make_store()
    _, lease, _ = store.begin_put(A, BODY_BYTES, 0)
    assert lease is not None
    assert store.commit(lease.id) == (0, 8)
    with pytest.raises(NotFound):
        store.commit(lease.id)


def test_pending_bytes_are_bounded(make_store: MakeStore) -> None:
    store = make_store(pages=8, max_pending_bytes=3 * FRAMED_BYTES)
    assert store.begin_put(A, BODY_BYTES, 0)[0] == [0, 1, 2]
    assert store.begin_put(B, BODY_BYTES, 0)[:2] == ([], None)


@pytest.mark.parametrize("max_pending_bytes", [BODY_BYTES, 1])
def test_largest_page_may_be_pending_alone(make_store: MakeStore, max_pending_bytes: int) -> None:
    store = make_store(pages=8, max_page_bytes=BODY_BYTES, max_pending_bytes=max_pending_bytes)
    assert store.begin_put(A, BODY_BYTES, 0)[0] == [0]
    assert store.begin_put(B, BODY_BYTES, 0)[:2] == ([], None)
    store.check_integrity()


def test_bounds_are_typed_errors(make_store: MakeStore) -> None:
    store = make_store(max_keys=4, max_page_bytes=BODY_BYTES, max_leases=1)
    twice = PageRun(A.namespace, 0, (A.hashes[0], A.hashes[0]))
    cases: list[tuple[type[QuireError], str, Callable[[], object]]] = [
        (TooLarge, "TOO_MANY_KEYS", lambda: store.lookup(A, 0, pin=True)),
        (TooLarge, "TOO_MANY_KEYS", lambda: store.begin_put(A, BODY_BYTES, 0)),
        (TooLarge, "BAD_PAGE_SIZE", lambda: store.begin_put(part(A, 0, 1), BODY_BYTES + 1, 0)),
        (TooLarge, "BAD_PAGE_SIZE", lambda: store.begin_put(part(A, 0, 1), 0, 0)),
        (InvalidArgument, "BAD_PAGE_KEY", lambda: store.lookup(chain("a", 1, namespace=b"short"), 0, pin=True)),
        (InvalidArgument, "DUPLICATE_PAGE", lambda: store.begin_put(twice, BODY_BYTES, 0)),
    ]
    for kind, code, call in cases:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.code == code and caught.value.fix
    put(store, part(A, 0, 2))
    store.lookup(part(A, 0, 2), 0, pin=True)
    for call in (lambda: store.lookup(part(A, 0, 2), 0, pin=True), lambda: store.begin_put(part(B, 0, 2), 64, 0)):
        with pytest.raises(Overloaded):
            call()


def test_indices_are_checked(make_store: MakeStore) -> None:
    store = make_store()
    put(store, part(A, 0, 3))
    _, lease = store.lookup(A, 0, pin=True)
    assert lease is not None
    assert list(store.readable_indices(lease.id, [])) == [0, 1, 2]
    assert list(store.readable_indices(lease.id, [2, 0])) == [2, 0]
    for bad in (3, -1):
        with pytest.raises(InvalidArgument, match="the lease has 3"):
            store.readable_indices(lease.id, [bad])


def test_hits_and_misses_are_counted_in_pages(make_store: MakeStore) -> None:
    store = make_store()
    put(store, part(A, 0, 3))
    store.lookup(A, 0, pin=True)
    store.lookup(B, 0, pin=True)
    stats = store.stats()
    assert (stats.counts.hits, stats.counts.misses, stats.leases, stats.pages) == (3, 13, 1, 3)


def test_a_watcher_sees_every_change_after_its_snapshot(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, part(A, 0, 4))
    watcher = store.open_watch()
    sequence, held = store.snapshot(watcher)
    assert set(held["ram"]) == set(part(A, 0, 4).keys())
    put(store, B)
    believed = set(held["ram"])
    changes = watcher.wait_for_changes() or []
    assert [change.sequence for change in changes] == [sequence + 1, sequence + 2]
    for change in changes:
        believed = believed - set(change.removed) | set(change.stored)
    present = [part(run, 0, length(store, run)) for run in (A, B)]
    assert believed == {run.key(index) for run in present for index in range(len(run))}
    assert len(believed) == 8
    store.close_watch(watcher)


def test_draining_finds_and_wants_nothing(make_store: MakeStore) -> None:
    store = make_store()
    put(store, part(A, 0, 3))
    watcher = store.open_watch()
    store.snapshot(watcher)
    store.drain()
    assert store.lookup(A, 0, pin=True) == (0, None)
    assert store.begin_put(B, BODY_BYTES, 0)[:2] == ([], None)
    assert watcher.wait_for_changes() is None and watcher.closed


@pytest.mark.parametrize("seed", range(3))
def test_random_use_from_many_threads_keeps_every_page_right(make_store: MakeStore, seed: int) -> None:
    """Readers check each byte they get; writers kill some puts; the store is small, so everything is evicted often."""
    store = make_store(pages=20, max_leases=64)
    runs = [chain(f"run {i}", 6) for i in range(8)]
    problems: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for _ in range(150):
                run = part(rng.choice(runs), 0, rng.randint(1, 6))
                if rng.random() < 0.5:
                    found, lease = store.lookup(run, 0, pin=True)
                    if lease is not None:
                        for index in range(found):
                            read_all(store, lease.id, run, index, step=rng.choice((200, FRAMED_BYTES)))
                        assert store.release([lease.id, lease.id]) == 1
                else:
                    wanted, lease, _ = store.begin_put(run, BODY_BYTES, 0)
                    if lease is not None:
                        for index in wanted[: rng.randint(0, len(wanted))]:
                            store.write(lease.id, index, 0, framed(run, index))
                        if rng.random() < 0.7:
                            store.commit(lease.id)
                        else:
                            store.release([lease.id])
                if rng.random() < 0.1:
                    store.check_integrity()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places inside every operation
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert problems == []
    stats = store.stats()
    assert (stats.leases, stats.pending_puts, stats.pending_bytes) == (0, 0, 0)
    assert stats.evictions > 0 and stats.counts.hits > 0 and stats.counts.corrupt == 0


def test_a_store_that_closes_leaves_the_memory_of_a_page_that_is_read(make_store: MakeStore) -> None:
    store = make_store()
    put(store, part(A, 0, 2))
    _found, lease = store.lookup(A, 0, pin=True)
    assert lease is not None
    with store.page_view(lease.id, 1) as page:
        before = bytes(page)
        store.close()
        assert bytes(page) == before
