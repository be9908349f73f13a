"""When pages are given to the kvstore, by policy; that it is bounded; and that what left the device comes back."""

from __future__ import annotations

from typing import Any

import pytest

from quire_common.credit import MoveKind
from quire_common.errors import Internal
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.offload import BATCH_PAGES
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence, random_ids, serve_alone
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed

Store = dict[bytes, list[int]]


def a_rig(store: Store, policy: str = "write-through", **more: Any) -> Rig:
    config = SchedulerConfig(kvstore_offload=policy, **more.pop("config", {}))
    worker = FakeWorker(make_hello(page_size=4, **more), store=store)
    return Rig(config, kvstore=True, worker=worker)


def moves(rig: Rig, kind: MoveKind) -> list[int]:
    return [len(move.device_page) for grant in rig.worker.seen for move in grant.move if move.kind is kind]


def test_answers_are_stored_in_batches_while_they_grow() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=200)
    rig.submit(1, a_sequence(13, 200))
    while len(rig.tokens[0, 1]) < 150:
        rig.step()
    stored = len(store)
    assert stored >= (150 - 8) // 4 - BATCH_PAGES
    assert all(count > BATCH_PAGES for count in moves(rig, MoveKind.STORE)[1:])
    rig.run()
    assert len(store) == 212 // 4 and rig.core.stats.offload_failed == rig.core.stats.offload_dropped == 0
    # What the first leaves is known to be there; another replica finds all of it.
    elsewhere = a_rig(store, num_pages=200)
    said = [*a_sequence(13).prompt_ids.tolist(), *rig.tokens[0, 1]]
    assert serve_alone(elsewhere, 1, a_sequence([*said, 5], 4)) == 214 - 212


def test_restarted_kvstore_is_offered_the_devices_pages_again() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=200)
    serve_alone(rig, 1, a_sequence(41, 4))
    before = set(store)
    store.clear()
    rig.boot_id = 2
    serve_alone(rig, 2, a_sequence(random_ids(41, 2), 4))
    assert not before & set(store), "nobody has asked for them since"
    assert serve_alone(rig, 3, a_sequence(41, 4)) == 1
    assert before <= set(store)


def test_prompt_is_stored_only_after_its_first_token() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=600, config={"max_num_batched_tokens": 32})
    rig.submit(1, a_sequence(random_ids(200, 1), 40))
    while not rig.tokens[0, 1]:
        rig.step()
        assert rig.tokens[0, 1] or not moves(rig, MoveKind.STORE)
    while not store:
        rig.step()
    assert len(rig.tokens[0, 1]) < 40, "nor when it leaves"
    rig.submit(2, a_sequence(random_ids(200, 2), 40))
    before = rig.core.stats.prefill_tokens
    while rig.core.stats.prefill_tokens < before + 100:
        rig.step()
    rig.core.abort(0, 2, rig.now)
    rig.run()
    assert len(store) == (200 + 39) // 4, "the second has drawn none"


def test_one_long_chain_is_stored_within_the_bound() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=161, max_num_seqs=1)
    rig.worker.move_turns = (9, 10)
    serve_alone(rig, 1, a_sequence(random_ids(240, 1), 1))
    assert rig.core.stats.offload_dropped == 60 - 20
    assert sum(moves(rig, MoveKind.STORE)) == len(store) == 160 // 8, "the head that fits"


def test_failing_stores_are_probed_by_one_move() -> None:
    rig = a_rig({}, num_pages=8001, max_model_len=4000, max_num_seqs=1)
    rig.worker.refuse_moves = True
    for handle in range(3):
        serve_alone(rig, handle, a_sequence(random_ids(17, handle), 1))
    before = len(moves(rig, MoveKind.STORE))
    rig.now += 60.0
    serve_alone(rig, 9, a_sequence(random_ids(1800, 9), 1))
    assert moves(rig, MoveKind.STORE)[before:] == [255]


def test_pages_of_a_failed_request_stay_quarantined() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=200)
    serve_alone(rig, 1, a_sequence(41, 4))
    offload = rig.core._replica.kv.offload
    first = [digest[1:] for digest in store]
    rig.worker.draw_error = Internal("NAN_LOGITS", "nan", "none")
    rig.submit(2, a_sequence([*range(4, 45), *random_ids(40, 2).tolist()], 4))
    while (0, 2) not in rig.errors:
        rig.step()
    rig.worker.draw_error = None
    assert len(store) == len(first), "no page of it is stored"
    damaged = first[:10]
    assert offload.any_quarantined(damaged[:1]) and offload.any_quarantined(damaged[9:])
    stores, asked = sum(moves(rig, MoveKind.STORE)), len(rig.looked_up)
    assert serve_alone(rig, 3, a_sequence(41, 4)) == 41 and len(rig.looked_up) == asked, "neither found nor looked up"
    assert sum(moves(rig, MoveKind.STORE)) == stores, "the kvstore would not replace them"
    offload.note_boot_id(2)
    assert all(offload.any_quarantined([digest]) for digest in damaged), "its disk outlives the kvstore's restart"


@pytest.mark.parametrize("policy", ["write-through", "on-evict"])
def test_damaged_page_in_the_kvstore_is_never_loaded(policy: str) -> None:
    store: Store = {}
    rig = a_rig(store, policy, num_pages=65, max_num_seqs=1)
    serve_alone(rig, 1, a_sequence(41, 4))
    for seed in range(8):
        serve_alone(rig, 10 + seed, a_sequence(random_ids(41, seed), 4))
    replica = rig.core._replica
    rig.submit(2, a_sequence(41, 4))
    while (0, 2) not in replica.requests or not replica.requests[0, 2].hashes:
        rig.step()
    damaged = replica.requests[0, 2].hashes[:10]
    rig.run()
    assert all(bytes([0]) + digest in store for digest in damaged)
    for digest in damaged:
        store[bytes([0]) + digest] = [0] * len(store[bytes([0]) + digest])
    replica.kv.offload.quarantine(damaged)
    loads = len(moves(rig, MoveKind.LOAD))
    for turn in range(3):
        # serve_alone checks the tokens, which a damaged page would change.
        for seed in range(8):
            serve_alone(rig, 100 * turn + 20 + seed, a_sequence(random_ids(41, 50 + 8 * turn + seed), 4))
        assert serve_alone(rig, 100 * turn + 40, a_sequence(41, 4)) > 20, "most pages had left the device"
        assert len(moves(rig, MoveKind.LOAD)) == loads
    assert all(not any(store[bytes([0]) + digest]) for digest in damaged), "the kvstore still has the damaged copies"


def test_found_page_that_is_quarantined_before_its_request_starts_is_not_loaded() -> None:
    store: Store = {}
    serve_alone(a_rig(store, num_pages=200), 1, a_sequence(41, 4))
    rig = a_rig(store, num_pages=200, max_num_seqs=1)
    for handle in (1, 2):
        rig.submit(handle, a_sequence(random_ids(9, handle), 20))
    while not rig.tokens[0, 1]:
        rig.step()
    rig.submit(3, a_sequence(41, 4))
    while not rig.leases:
        rig.step()
    replica = rig.core._replica
    assert not replica.kv.idle, "the request waits for a slot"
    replica.kv.offload.quarantine(replica.requests[0, 3].hashes[3:4])
    rig.run()
    assert not moves(rig, MoveKind.LOAD) and not rig.leases


def test_quarantine_remembers_the_latest_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_scheduler.kv.offload._MOST_QUARANTINED", 3)
    offload = a_rig({}, num_pages=200).core._replica.kv.offload
    offload.quarantine([b"1", b"2", b"3"])
    offload.quarantine([b"1", b"4"])
    assert [offload.any_quarantined([digest]) for digest in (b"1", b"2", b"3", b"4")] == [True, False, True, True]


def test_pages_lent_to_a_store_are_not_free_at_once() -> None:
    rig = a_rig({}, num_pages=41, max_num_seqs=2)
    rig.worker.move_turns = (3000, 3001)
    rig.submit(0, a_sequence(random_ids(24, 0), 30))
    pools, found = rig.core._replica.pools, 0
    for _ in range(60):
        rig.step()
        for request in rig.core._replica.requests.values():
            if request.tables and (lent := sum(pools.pools[0].is_lent(page) for page in request.tables[0])):
                found = max(found, lent)
                assert pools.freed_by(request) - pools.freed_by(request, lent=False) == lent
    assert found


def test_on_evict_stores_pages_before_eviction() -> None:
    store: Store = {}
    rig = a_rig(store, "on-evict", num_pages=65, max_num_seqs=1)
    said = {seed: random_ids(41, seed) for seed in range(12)}
    for seed in range(4):
        serve_alone(rig, seed, a_sequence(said[seed], 4))
    assert not store, "there is room"
    for seed in range(4, 12):
        serve_alone(rig, seed, a_sequence(said[seed], 4))
    stats = rig.core.stats
    assert store and len(store) < 12 * 11, "what stays is not stored"
    assert stats.offload_missed == 0
    assert serve_alone(rig, 20, a_sequence(said[0], 4)) <= 1 + 4 * 2
    assert stats.loaded_tokens[""] > 20


def test_crowded_kvstore_is_not_offered_pages_again_while_idle() -> None:
    rig = a_rig({}, "on-evict", num_pages=65, max_num_seqs=2, config={"kvstore_moves": 1})
    rig.worker.crowded_store, rig.worker.move_turns = True, (6, 7)
    for seed in range(8):
        serve_alone(rig, seed, a_sequence(random_ids(41, seed), 4))
    tried = len(moves(rig, MoveKind.STORE))
    for _ in range(50):
        rig.step()
    assert tried > 1 and len(moves(rig, MoveKind.STORE)) == tried


def test_selective_stores_pages_that_two_requests_use() -> None:
    store: Store = {}
    rig = a_rig(store, "selective", num_pages=200)
    serve_alone(rig, 1, a_sequence(random_ids(41, 1), 30))
    assert not store
    serve_alone(rig, 2, a_sequence([*random_ids(21, 1).tolist(), *random_ids(20, 2).tolist()], 30))
    assert len(store) == 5, "how both begin, and nothing of how they go on"
    for handle in (3, 4):
        rig.submit(handle, a_sequence(random_ids(33, 9), 4))
    rig.run()
    assert len(store) == 5 + 8, "siblings are two at once"


def test_selective_stores_no_page_that_one_request_finds_again_after_a_preemption() -> None:
    store: Store = {}
    rig = a_rig(store, "selective", num_pages=200)
    rig.submit(1, a_sequence(random_ids(41, 1), 60))
    rig.step_until(lambda: len(rig.tokens[0, 1]) >= 20)
    request = rig.core._replica.requests[0, 1]
    rig.core._lifecycle.preempt(request, rig.now)
    rig.step_until(lambda: request.local_tokens > 0)
    assert request.local_tokens >= 41, "its own pages"
    rig.run()
    assert len(rig.tokens[0, 1]) == 60 and not store
    serve_alone(rig, 2, a_sequence(random_ids(41, 1), 30))
    assert len(store) == 10, "the whole prompt's full pages, now that a second request uses them"


def test_selective_counts_no_page_as_dropped_that_one_request_uses() -> None:
    rig = a_rig({}, "selective", num_pages=600, config={"max_num_batched_tokens": 32})
    rig.submit(1, a_sequence(random_ids(200, 1), 40))
    while rig.core.stats.prefill_tokens < 100:
        rig.step()
    rig.core.abort(0, 1, rig.now)
    rig.run()
    assert rig.core.stats.offload_dropped == 0


def test_selective_counts_pages_of_two_requests_as_dropped_without_room() -> None:
    rig = a_rig({}, "selective", num_pages=200)
    rig.core._replica.kv.offload._max_stores = 0
    serve_alone(rig, 1, a_sequence(random_ids(41, 1), 30))
    serve_alone(rig, 2, a_sequence([*random_ids(21, 1).tolist(), *random_ids(20, 2).tolist()], 30))
    assert rig.core.stats.offload_dropped == 5, "how both begin, and nothing of how they go on"


def test_offload_off_stores_nothing_but_still_loads() -> None:
    store: Store = {}
    serve_alone(a_rig(store), 1, a_sequence(41, 4))
    there = len(store)
    rig = a_rig(store, "off")
    assert serve_alone(rig, 1, a_sequence(41, 30)) == 1
    assert len(store) == there and not moves(rig, MoveKind.STORE)


def test_evicted_conversation_is_loaded_when_it_returns() -> None:
    store: Store = {}
    rig = a_rig(store, num_pages=30, max_num_seqs=2)
    said = {user: random_ids(13, user).tolist() for user in range(6)}
    handle = 0
    for turn in range(3):
        for user in said:
            handle += 1
            computed = serve_alone(rig, handle, a_sequence(said[user], 8))
            assert not turn or computed <= 4 + 1 + 3, "what was said this time, and the last page's tokens"
            said[user] += [*rig.tokens[0, handle], 5, 6, 7]
    stats = rig.core.stats
    assert stats.loaded_tokens[""] > 100
    assert stats.prompt_kvstore > 100
    assert stats.prompt_kvstore + stats.prompt_local + stats.prompt_computed == stats.prompt_tokens


@pytest.mark.parametrize("policy", ["write-through", "on-evict"])
def test_stores_beyond_the_bound_are_dropped_and_counted(policy: str) -> None:
    store: Store = {}
    rig = a_rig(store, policy, num_pages=40, max_num_seqs=4, config={"kvstore_moves": 1})
    rig.worker.move_turns = (6, 7)
    most = 0
    for handle in range(24):
        rig.submit(handle, a_sequence(random_ids(17, handle), 12))
    while rig.step() or not rig.core.quiet:
        most = max(most, rig.core._replica.moves.stores)
        rig.core.check_integrity()
    rig.run()
    assert most == 1
    assert rig.core.stats.offload_dropped + rig.core.stats.offload_missed > 0


def test_failed_store_is_retried_then_paused() -> None:
    store: Store = {}
    rig = a_rig(store)
    rig.worker.refuse_moves = True
    for handle in range(8):
        serve_alone(rig, handle, a_sequence(random_ids(17, handle), 4))
    stats, tried = rig.core.stats, len(moves(rig, MoveKind.STORE))
    assert stats.offload_failed > 0 and tried < 8, "it is not asked in vain for ever"
    rig.worker.refuse_moves = False
    rig.now += 60.0
    serve_alone(rig, 20, a_sequence(random_ids(17, 1), 4))
    assert stats.offload_dropped > 0
    assert len(store) >= 5, "it is tried again"


def test_growth_waits_for_stores_before_it_preempts() -> None:
    """The pages of who has left are free when their store has ended: that is soon."""
    rig = a_rig({}, num_pages=24, max_num_seqs=2)
    rig.worker.move_turns = (5, 6)
    rig.submit(1, a_sequence(random_ids(40, 1), 1))
    while not moves(rig, MoveKind.STORE):
        rig.step()
    rig.submit(2, a_sequence(random_ids(40, 2), 40))
    rig.submit(3, a_sequence(random_ids(3, 3), 20))
    rig.run()
    assert all((0, handle) in rig.ends for handle in (1, 2, 3))
    assert rig.core.stats.preemptions == 0


def swapping(store: Store, *, step_us: int, move_us: int) -> Rig:
    """Four that do not fit, on a worker that says how long things take."""
    rig = a_rig(store, num_pages=21, max_num_seqs=4)
    rig.worker.step_us, rig.worker.move_us = step_us, move_us
    sequences = {handle: a_sequence(random_ids(14, handle), 30) for handle in range(4)}
    for handle, sequence in sequences.items():
        rig.submit(handle, sequence)
    rig.run()
    for handle, sequence in sequences.items():
        assert rig.tokens[0, handle] == undisturbed(sequence, max_len=rig.core.max_len)[0]
    return rig


def test_preempted_request_is_swapped_where_prefill_is_slow() -> None:
    stats = swapping({}, step_us=500_000, move_us=100).core.stats
    assert stats.swaps > 0 and stats.swaps + stats.recomputes == stats.preemptions
    assert stats.loaded_tokens[""] > 0, "what had left the device came back"


def test_preempted_request_is_recomputed_where_moves_are_slow() -> None:
    stats = swapping({}, step_us=10, move_us=2_000_000).core.stats
    assert stats.preemptions > 0 and stats.swaps == 0


def test_preempted_request_is_recomputed_without_measurements() -> None:
    assert swapping({}, step_us=0, move_us=100).core.stats.swaps == 0


@pytest.mark.parametrize(("lacking", "swapped"), [((60, 70), True), ((0, 70), False)])
def test_known_pages_between_unstored_ones_count_in_a_swap(lacking: tuple[int, int], swapped: bool) -> None:
    rig = a_rig({}, num_pages=101, max_num_seqs=1, max_model_len=400)
    rig.worker.step_us, rig.worker.move_us = 500_000, 100
    rig.submit(1, a_sequence(random_ids(300, 1), 60))
    while len(rig.tokens[0, 1]) < 40:
        rig.step()
    replica = rig.core._replica
    request = replica.requests[0, 1]
    replica.kv.offload.remember(request.hashes)
    replica.kv.offload.forget([request.hashes[index] for index in lacking])
    before = replica.moves.storing_pages
    rig.core._lifecycle.preempt(request, rig.now, swaps=True)
    assert rig.core.stats.swaps == swapped and replica.moves.storing_pages - before <= 100 // 2
    rig.run()
