"""Pages to and from the kvstore, by their effects on requests, leases and references."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire_common.credit import MoveKind
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.kv_traffic import LookupResult
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed

NO_CACHE = SchedulerConfig(enable_prefix_caching=False)


def rig_with(store: dict[bytes, list[int]], config: SchedulerConfig | None = None, **more: float) -> Rig:
    """Without a prefix cache: pages must come from the store."""
    config = replace(config or SchedulerConfig(), enable_prefix_caching=False)
    return Rig(config, kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store, **more))  # type: ignore[arg-type]  # by name


def moves(rig: Rig, kind: MoveKind) -> list[int]:
    return [len(move.device_page) for grant in rig.worker.seen for move in grant.move if move.kind is kind]


def test_prompt_is_stored_once_and_loaded_by_later_requests() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    for handle in range(3):
        rig.submit(handle, a_sequence(13, 4))
        rig.run()
    assert moves(rig, MoveKind.STORE) == [3, 2], "the prompt, and the answer's page after its parent; none of it again"
    assert moves(rig, MoveKind.LOAD) == [3, 3]
    assert [rig.notes[0, h].cached_tokens for h in range(3)] == [0, 12, 12]
    assert all(rig.tokens[0, h] == undisturbed(a_sequence(13, 4))[0] for h in range(3))
    assert rig.core.stats.cache_queries == 36 and rig.core.stats.cache_hits == 24
    assert {(hop.service, hop.phase) for hop in rig.notes[0, 1].hops} >= {("kvstore", "lookup"), ("kvstore", "load")}


def test_the_last_prompt_token_is_always_computed() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    for handle in range(2):
        rig.submit(handle, a_sequence(12, 4))
        rig.run()
    assert rig.notes[0, 1].cached_tokens == 8
    short = rig_with(store)
    short.submit(1, a_sequence(4, 4))
    short.step()
    assert not short.leases, "a single page that must be computed anyway is not asked for"
    short.run()


def test_skip_and_salt_are_honoured() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    rig.submit(1, a_sequence(13, 4, cache_salt="a"))
    rig.run()
    rig.submit(2, a_sequence(13, 4, cache_salt="a", skip_cache_read=True))
    rig.submit(3, a_sequence(13, 4, cache_salt="b"))
    rig.submit(4, a_sequence(13, 4, cache_salt="a"))
    rig.run()
    assert [rig.notes[0, h].cached_tokens for h in (2, 3, 4)] == [0, 0, 12]


def test_short_prompts_are_neither_stored_nor_looked_up() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store, SchedulerConfig(kvstore_min_tokens=20))
    rig.submit(1, a_sequence(13, 4))
    rig.run()
    assert not store


def test_failed_loads_are_recomputed() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    rig.submit(1, a_sequence(21, 4))
    rig.run()
    unlucky = rig_with(store, fail_moves=1.0, rng=np.random.default_rng(3))  # type: ignore[arg-type]  # by name
    for handle in range(6):
        unlucky.submit(handle, a_sequence(21, 4))
    unlucky.run()
    for handle in range(6):
        assert unlucky.tokens[0, handle] == undisturbed(a_sequence(21, 4))[0]
        assert unlucky.notes[0, handle].cached_tokens < 20


def test_page_that_the_kvstore_lost_is_stored_again() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    rig.submit(1, a_sequence(13, 4))
    rig.run()
    store.clear()
    rig.submit(2, a_sequence(13, 4))
    rig.run()
    assert moves(rig, MoveKind.STORE) == [3, 2, 3] and len(store) == 3


def test_a_store_names_a_chain_without_gaps() -> None:
    """The kvstore tells watchers of each page's parent: the one before it in the put."""
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store, SchedulerConfig(kvstore_known_pages=2))
    rig.submit(1, a_sequence(13, 4))
    rig.run()
    rig.submit(2, a_sequence(21, 4, skip_cache_read=True))
    rig.run()
    hashes = [move.hashes for grant in rig.worker.seen for move in grant.move if move.kind is MoveKind.STORE]
    assert [len(chain) for chain in hashes] == [3, 2, 5, 2], "the first pages were forgotten, the next two were not"
    assert hashes[2][:3] == hashes[0]
    assert hashes[1][0] == hashes[0][-1] and hashes[3][0] == hashes[2][-1], "each goes on from its parent"


def test_stores_are_bounded() -> None:
    rig = rig_with({}, SchedulerConfig(kvstore_moves=1))
    for handle in range(4):
        rig.submit(handle, a_sequence(np.arange(9) + 10 * handle + 2, 1))
    rig.run()
    assert 1 <= len(moves(rig, MoveKind.STORE)) < 4


def test_abort_during_a_load_keeps_its_pages_until_it_is_reported() -> None:
    store: dict[bytes, list[int]] = {}
    rig = rig_with(store)
    rig.submit(1, a_sequence(21, 4))
    rig.run()
    rig.worker.move_turns = (2, 4)
    rig.submit(2, a_sequence(21, 4))
    while not moves(rig, MoveKind.LOAD):
        rig.step()
    assert rig.leases and rig.core.abort(0, 2, rig.now)
    assert rig.core.load().referenced_pages == 5
    rig.core.check_integrity()
    rig.run()


def test_lookup_answer_after_an_abort_releases_its_lease() -> None:
    rig = rig_with({})
    rig.submit(1, a_sequence(21, 4))
    rig.core.next_grant(rig.now)
    (lookup,) = rig.core.take_effects().lookups
    rig.core.abort(0, 1, rig.now)
    rig.core.on_lookup(lookup.uid, LookupResult(5, (b"lease",), 10, rig.now + 60))
    assert rig.core.take_effects().releases == [b"lease"]
    assert rig.core.quiet


def test_lease_that_ends_before_the_start_is_looked_up_again() -> None:
    rig = Rig(NO_CACHE, kvstore=True, worker=FakeWorker(make_hello(page_size=4, max_num_seqs=1)))
    rig.submit(1, a_sequence(3, 30))
    rig.submit(2, a_sequence(21, 4))
    rig.step()
    rig.worker.store.clear()
    # Whatever the rig answered, pretend that pages were found under a lease that is over at once.
    request = rig.core._replica.requests[0, 2]
    rig.core._replica.kv._found[request.uid] = LookupResult(5, (b"old",), 10, rig.now)
    rig.leases.add(b"old")
    rig.run()
    assert b"old" in rig.released
    assert rig.notes[0, 2].cached_tokens == 0
    assert rig.tokens[0, 2] == undisturbed(a_sequence(21, 4))[0]


def test_a_loaded_request_that_is_preempted_computes_its_prompt() -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    first.submit(0, a_sequence(13, 4))
    first.run()
    worker = FakeWorker(make_hello(page_size=4, num_pages=18, max_num_seqs=3), store=store)
    rig = Rig(NO_CACHE, kvstore=True, worker=worker)
    for handle in range(3):
        rig.submit(handle, a_sequence(13, 40))
    rig.run()
    assert rig.core.stats.preemptions > 0 and rig.core.stats.cached_tokens == 36
    expected = undisturbed(a_sequence(13, 40), max_len=rig.core.max_len)[0]
    assert all(rig.tokens[0, handle] == expected for handle in range(3))
    assert rig.notes[0, 2].cached_tokens == 0
