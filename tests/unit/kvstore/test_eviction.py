"""The store when it is full: what goes first, what is never touched, what leases keep and what their end gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quire_common.errors import NotFound
from quire_common.pages import HEADER_BYTES
from tests.unit.kvstore.pages import BODY_BYTES, FRAMED_BYTES, Clock, chain, framed, length, part, put, read_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_kvstore.page_store import PageStore

    MakeStore = Callable[..., PageStore]

A, B, C = chain("a", 8), chain("b", 8), chain("c", 8)


def test_the_least_recently_used_chain_goes_first_and_from_its_tail(make_store: MakeStore) -> None:
    store = make_store(pages=12)
    put(store, part(A, 0, 6))
    put(store, part(B, 0, 6))
    _, lease = store.lookup(A, 0, pin=True)  # A is now the younger one
    assert lease is not None
    store.release([lease.id])
    put(store, part(C, 0, 2))
    assert (length(store, A), length(store, B), length(store, C)) == (6, 4, 2)
    put(store, part(C, 0, 7))
    assert (length(store, A), length(store, B), length(store, C)) == (5, 0, 7)
    assert store.stats().evictions == 7


def test_a_chain_that_grows_loses_its_new_tail_before_its_old_head(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, part(A, 0, 4))
    put(store, part(A, 0, 8))
    put(store, part(B, 0, 3))
    assert (length(store, A), length(store, B)) == (5, 3)


def test_a_put_does_not_eat_its_own_head(make_store: MakeStore) -> None:
    store = make_store(pages=4)
    put(store, part(A, 0, 3))
    assert store.begin_put(A, BODY_BYTES, 0)[0] == [3]


def test_pinned_pages_are_never_evicted_and_a_full_store_refuses_at_once(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, A)
    _, lease = store.lookup(A, 0, pin=True)
    assert lease is not None
    assert store.begin_put(B, BODY_BYTES, 0)[:2] == ([], None)
    assert store.stats().counts.refused == 8
    for index in range(8):
        read_all(store, lease.id, A, index)
    store.release([lease.id])
    assert put(store, B) == (8, 0)
    assert length(store, A) == 0


def test_two_leases_pin_twice(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, A)
    leases = [store.lookup(A, 0, pin=True)[1] for _ in range(2)]
    assert leases[0] is not None and leases[1] is not None
    store.release([leases[0].id])
    assert store.begin_put(B, BODY_BYTES, 0)[0] == []
    assert store.release([leases[0].id, b"unknown"]) == 0, "releasing again is nothing"
    assert store.begin_put(B, BODY_BYTES, 0)[0] == []
    assert store.release([leases[1].id]) == 1
    assert put(store, B) == (8, 0)


def test_an_expired_lease_reads_nothing_even_if_its_pages_are_still_there(make_store: MakeStore, clock: Clock) -> None:
    store = make_store()
    put(store, A)
    _, lease = store.lookup(A, 500, pin=True)
    assert lease is not None
    store.read(lease.id, 0, 0, 100)
    clock.now_s += 0.5
    for call in (
        lambda: store.read(lease.id, 0, 100, 100),
        lambda: store.readable_indices(lease.id, []),
        lambda: store.renew(lease.id, 500),
    ):
        with pytest.raises(NotFound):
            call()
    assert put(store, B) == (8, 0), "its pages may go"


def test_renewing_keeps_pages_pinned(make_store: MakeStore, clock: Clock) -> None:
    store = make_store()
    put(store, A)
    _, lease = store.lookup(A, 1000, pin=True)
    assert lease is not None
    for _ in range(5):
        clock.now_s += 0.9
        assert store.renew(lease.id, 1000) == 1000
    assert store.begin_put(B, BODY_BYTES, 0)[0] == []


def test_a_put_whose_client_died_gives_its_memory_back(make_store: MakeStore, clock: Clock) -> None:
    store = make_store()
    wanted, lease, _ = store.begin_put(A, BODY_BYTES, 1000)
    assert len(wanted) == 8 and lease is not None
    store.write(lease.id, 0, 0, framed(A, 0))
    assert store.begin_put(B, BODY_BYTES, 0)[0] == [], "no room, and nothing to evict"
    clock.now_s += 1
    for call in (lambda: store.write(lease.id, 1, 0, b"late"), lambda: store.commit(lease.id)):
        with pytest.raises(NotFound):
            call()
    assert put(store, B) == (8, 0)
    assert length(store, A) == 0
    assert store.stats().pending_bytes == 0


def test_a_page_larger_than_the_store_is_refused_and_evicts_nobody(make_store: MakeStore) -> None:
    store = make_store(pages=4)
    put(store, part(A, 0, 4))
    assert store.begin_put(part(B, 0, 1), 9 * FRAMED_BYTES, 0)[:2] == ([], None)
    assert length(store, A) == 4


def test_pages_of_several_sizes_share_the_memory(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, A)
    big = 2 * FRAMED_BYTES - HEADER_BYTES
    wanted, lease, _ = store.begin_put(part(B, 0, 4), big, 0)
    assert wanted == [0, 1, 2, 3] and lease is not None
    for index in wanted:
        store.write(lease.id, index, 0, framed(B, index, big))
    assert store.commit(lease.id) == (4, 0)
    assert (length(store, A), length(store, B)) == (0, 4)


def test_looking_without_pinning_leaves_no_trace(make_store: MakeStore) -> None:
    store = make_store(pages=8)
    put(store, part(A, 0, 4))
    put(store, part(B, 0, 4))
    assert store.lookup(part(A, 0, 4), 0, pin=False) == (4, None)
    put(store, part(C, 0, 4))
    assert (length(store, A), length(store, B)) == (0, 4)
    assert store.stats().counts.hits == store.stats().counts.misses == 0
