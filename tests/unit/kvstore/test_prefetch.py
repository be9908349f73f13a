"""Lookups that wait for pages below memory: company, and no room. Integrity is checked after each."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent import futures
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from quire_common.errors import NotFound, Overloaded
from quire_kvstore.page_store import PageStore
from quire_kvstore.prefetch import WINDOW
from quire_kvstore.tiers.tier import Tier, TierSettings
from tests.unit.kvstore.pages import (
    BODY_BYTES,
    FRAMED_BYTES,
    PLACE_BYTES,
    chain,
    config,
    framed,
    length,
    part,
    put,
    read_all,
)
from tests.unit.kvstore.scripted_backend import ScriptedBackend
from tests.unit.kvstore.tiers import eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quire_common.pages import PageRun

A, B, C = chain("a", 8), chain("b", 8), chain("c", 8)
LONG_S = 60.0


@contextlib.contextmanager
def over(
    *backends: ScriptedBackend, pages: int = 64, threads: int = 1, read_queue: int = 1000, **changes: object
) -> Iterator[PageStore]:
    settings = TierSettings(None, threads, 1, read_queue, 100)
    store = PageStore(replace(config(pages), **changes), tiers=[Tier(backend, settings) for backend in backends])  # type: ignore[arg-type]  # changes by name
    store.start()
    try:
        yield store
        for backend in backends:
            backend.release_all()
        eventually(lambda: not store._tier_manager._loading)
        store.check_integrity()
    finally:
        for backend in backends:
            backend.release_all()
        store.drain()
        store.close()


def holding(*runs: PageRun, free: bool = True, blind: bool = False) -> ScriptedBackend:
    backend = ScriptedBackend(free=free, blind=blind)
    backend.held = {run.key(index): framed(run, index) for run in runs for index in range(len(run))}
    return backend


def test_no_time_means_memory_alone() -> None:
    backend = holding(A, free=False)
    with over(backend) as store:
        assert store.lookup(A, 0, pin=True, wait_s=0) == (0, None)
        put(store, part(B, 0, 2))
        assert found(store, B, wait_s=0) == (2, "ram")
        assert not backend.reads


def test_pages_wanted_by_many_are_read_once() -> None:
    backend = holding(A, free=False)
    with over(backend, pages=16) as store, futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(found, store, A, LONG_S) for _ in range(6)]
        eventually(lambda: store._tier_manager._waiting == 6)
        backend.release_all()
        assert [each.result(timeout=60) for each in asked] == [(8, "scripted")] * 6
        assert sorted(backend.reads, key=A.keys().index) == list(A.keys())
    figures = store._lookup_counts.with_lookups("scripted", backend.counts.snapshot())
    assert figures.hits == 48


def test_a_gap_ends_the_prefix_at_once() -> None:
    backend = holding(A, blind=True)
    del backend.held[A.key(3)]
    with over(backend) as store:
        assert found(store, A, wait_s=LONG_S) == (3, "scripted")
        assert found(store, B, wait_s=LONG_S) == (0, "")


def test_a_cold_lookup_of_a_long_prompt_asks_for_one_window_at_most() -> None:
    backend = holding(blind=True)
    with over(backend, read_queue=WINDOW) as store:
        assert found(store, chain("long", 4000), wait_s=LONG_S) == (0, "")
        assert len(backend.reads) <= WINDOW and backend.counts.snapshot().dropped == 0


def test_a_long_prefix_comes_window_by_window() -> None:
    long = chain("long", 3 * WINDOW + 5)
    with over(holding(long), pages=4 * WINDOW, threads=3) as store:
        assert found(store, long, wait_s=LONG_S) == (len(long), "scripted")


def test_what_one_tier_has_lost_the_next_may_have() -> None:
    upper, lower = holding(A), holding(A, blind=True)
    upper.held[A.key(2)] = framed(B, 2)
    upper.held[A.key(4)] = bytes(FRAMED_BYTES)
    lower.name = "lower"
    with over(upper, lower) as store:
        assert found(store, A, wait_s=LONG_S) == (8, "lower")
        assert set(lower.reads) == {A.key(2), A.key(4)}
        assert [stats.figures.hits for stats in store.stats().tiers] == [0, 6, 2]
        assert [stats.figures.misses for stats in store.stats().tiers] == [8, 2, 0]
        assert upper.counts.snapshot().corrupt == 2 and upper.pages == 6


def test_pages_in_memory_beyond_a_gap_are_used_and_let_go() -> None:
    backend = holding(part(A, 2, 4))
    with over(backend, pages=10) as store:
        put(store, part(A, 0, 2))
        put(store, part(A, 4, 8))
        assert found(store, A, wait_s=LONG_S) == (8, "scripted")
        del backend.held[A.key(3)]
        forget_memory(store)
        put(store, part(A, 0, 2))
        put(store, part(A, 4, 8))
        assert found(store, A, wait_s=LONG_S) == (3, "scripted")
        assert put(store, B) == (8, 0), "nothing is left pinned"


def test_no_room_in_memory_ends_the_prefix() -> None:
    backend = holding(B)
    with over(backend, pages=8) as store:
        put(store, part(A, 0, 5))
        pages, lease = store.lookup(A, 0, pin=True)
        assert pages == 5 and lease is not None
        assert found(store, B, wait_s=LONG_S) == (3, "scripted"), "the lease keeps its pages"
        for index in range(5):
            read_all(store, lease.id, A, index)
        assert store.begin_put(C, BODY_BYTES, 0)[0] == [0, 1, 2], "a put may have what nobody holds, and no more"
        store.release([lease.id])


def test_a_full_queue_is_a_miss() -> None:
    backend = holding(A, free=False)
    with over(backend, read_queue=2) as store:
        assert store.lookup(A, 0, pin=True, wait_s=0.1) == (0, None)
        assert backend.counts.snapshot().dropped >= 1
        backend.release_all()
        eventually(lambda: not store._tier_manager._loading)
        assert found(store, A, wait_s=LONG_S)[0] >= 2


def test_so_many_lookups_wait_and_no_more() -> None:
    backend = holding(A, B, free=False)
    with over(backend, max_prefetches=1) as store, futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(found, store, A, LONG_S)
        eventually(lambda: store._tier_manager._waiting == 1)
        assert store.lookup(B, 0, pin=True, wait_s=LONG_S) == (0, None)
        backend.release_all()
        assert waiting.result(timeout=60) == (8, "scripted")
        assert found(store, B, LONG_S) == (8, "scripted")


def test_a_put_and_a_load_of_the_same_page_agree() -> None:
    backend = holding(A, free=False, blind=True)
    with over(backend) as store, futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(found, store, A, LONG_S)
        assert backend.begun.acquire(timeout=60)
        wanted, lease, _ = store.begin_put(A, BODY_BYTES, 0)
        assert wanted == list(range(8)) and lease is not None
        for index in wanted:
            store.write(lease.id, index, 0, framed(A, index))
        backend.allow(4)
        eventually(lambda: store.stats().pages >= 4)
        assert store.commit(lease.id) == (8, 0)
        backend.release_all()
        assert waiting.result(timeout=60) == (8, "scripted")
        assert store.stats().used_bytes == 8 * PLACE_BYTES


def test_a_medium_with_a_bug_is_a_miss() -> None:
    backend = holding(A)
    with over(backend) as store:
        backend.broken = True
        assert found(store, A, wait_s=LONG_S) == (0, "")
        assert backend.counts.snapshot().errors >= 1
        backend.broken = False
        assert found(store, A, wait_s=LONG_S) == (8, "scripted")


def test_a_refused_lease_leaves_nothing_pinned() -> None:
    backend = holding(A, B)
    with over(backend, pages=16, max_leases=1) as store:
        _, lease = store.lookup(A, 0, pin=True, wait_s=LONG_S)
        with pytest.raises(Overloaded):
            store.lookup(B, 0, pin=True, wait_s=LONG_S)
        assert lease is not None and store.release([lease.id]) == 1
        assert put(store, C) == (8, 0)


def test_a_store_that_drains_answers_who_waits_with_a_miss() -> None:
    backend = holding(A, free=False)
    with over(backend) as store, futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.lookup, A, 0, pin=True, wait_s=LONG_S)
        eventually(lambda: store._tier_manager._waiting == 1)
        store.drain()
        backend.release_all()
        assert waiting.result(timeout=60) == (0, None)


def test_a_lease_that_expires_while_its_pages_are_also_below(tmp_path: Path) -> None:
    with tiered(disk=tmp_path) as store:
        put(store, A)
        store.flush(30)
        forget_memory(store)
        pages, lease = store.lookup(A, 1, pin=True)
        assert pages == 8 and lease is not None
        eventually(lambda: store.stats().leases == 0)
        with pytest.raises(NotFound):
            store.read(lease.id, 0, 0, 100)
        forget_memory(store)
        assert found(store, A) == (8, "disk")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_many_threads_over_a_small_memory_and_a_small_disk(tmp_path: Path, policy: str) -> None:
    """Whatever they do, every byte is right, and in the end nothing is held."""
    runs = [chain(f"run {number}", 6) for number in range(8)]

    def work(store: PageStore, seed: int) -> int:
        chance, hits = random.Random(seed), 0
        for _ in range(60):
            run = chance.choice(runs)
            if chance.random() < 0.4:
                put(store, part(run, 0, chance.randint(1, 6)))
            else:
                hits += found(store, run, wait_s=chance.choice([0, 0.001, LONG_S]))[0]
            if chance.random() < 0.1:
                for file in list(tmp_path.rglob("*.page"))[:2]:
                    with contextlib.suppress(OSError):
                        file.write_bytes(chance.randbytes(1000))
        return hits

    with tiered(pages=20, disk=tmp_path, disk_pages=30, disk_policy=policy, ram_policy=policy) as store:
        with futures.ThreadPoolExecutor(6) as pool:
            hits = sum(each.result(timeout=120) for each in [pool.submit(work, store, seed) for seed in range(6)])
        eventually(lambda: not store._tier_manager._loading)
        store.flush(30)
        assert hits > 0
        stats = store.stats()
        assert (stats.leases, stats.pending_puts, stats.pending_bytes) == (0, 0, 0)
        for file in tmp_path.rglob("*.page"):  # a file of ours that we broke may still be in the index
            if file.stat().st_size != 4096:
                file.write_bytes(bytes(4096))
        for run in runs:
            found(store, run)
        assert tier(store, "disk").figures.errors == 0


def test_watchers_follow_pages_through_the_tiers(tmp_path: Path) -> None:
    with tiered(pages=8, disk=tmp_path, disk_pages=4) as store:
        watcher = store.open_watch()
        first, _ = store.snapshot(watcher)
        for run in (A, B, part(C, 0, 3)):
            put(store, run)
            store.flush(30)
            forget_memory(store)
        assert found(store, part(C, 0, 3)) == (3, "disk")
        put(store, chain("last", 1))
        store.flush(30)
        believed: set[object] = set()
        changes = watcher.wait_for_changes() or []
        assert len(changes) == store._feed.sequence - first
        for change in changes:
            believed.difference_update(change.removed)
            believed.update(change.stored)
        present = set(filter(store._tier_manager.has_page, (*A.keys(), *B.keys(), *C.keys(), *chain("last", 1).keys())))
        assert believed == present and len(present) >= 4
        held = store.snapshot(watcher)[1]
        assert {key for keys in held.values() for key in keys} == present
        store.close_watch(watcher)
        assert length(store, part(C, 0, 3)) == 3


def test_a_wrong_page_that_cannot_be_checked_or_removed_keeps_no_lookup_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that never came would be waited for by each later lookup of the page too."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    for at in ("quire_kvstore.tiers.tier.check_page", "tests.unit.kvstore.scripted_backend.ScriptedBackend.discard"):
        backend = holding(A)
        backend.held[A.key(3)] = b"garbage" * 20
        with over(backend) as store, monkeypatch.context() as patch:
            patch.setattr(at, broken)
            began = time.monotonic()
            for _ in range(3):
                assert found(store, A, wait_s=LONG_S)[0] == (0 if at.endswith("check_page") else 3)
            assert time.monotonic() - began < LONG_S / 2
            eventually(lambda: not store._tier_manager._loading)
