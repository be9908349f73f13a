"""The prefix cache, by what starts are told to skip and by what is computed."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import MoveKind
from quire_common.finish import FinishReason
from quire_common.pages import PageExtras, chain_hashes
from quire_common.sequence import Sequence
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence, random_ids, serve_alone
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed


def cached(rig: Rig, handle: int) -> int:
    return rig.notes[0, handle].cached_tokens


def test_repeated_prompt_is_served_from_cache() -> None:
    rig = Rig(page_size=4)
    assert serve_alone(rig, 1, a_sequence(13, 4)) == 13
    assert serve_alone(rig, 2, a_sequence(13, 4)) == 1 and cached(rig, 2) == 12
    assert serve_alone(rig, 3, a_sequence(12, 4)) == 4 and cached(rig, 3) == 8, "the last token is always computed"
    assert serve_alone(rig, 4, a_sequence(30, 4)) == 30 - 12
    stats = rig.core.stats
    assert (stats.prompt_computed, stats.prompt_local, stats.prompt_kvstore) == (13 + 1 + 4 + 18, 12 + 8 + 12, 0)
    assert (stats.prefix_queries, stats.prefix_hits) == (13 + 13 + 12 + 30, 32)
    assert stats.prompt_tokens == 68 and stats.cached_tokens == 32


def test_next_turn_finds_pages_of_the_answer() -> None:
    rig = Rig(page_size=4)
    serve_alone(rig, 1, a_sequence(random_ids(10, 1), 11))
    said = [*random_ids(10, 1).tolist(), *rig.tokens[0, 1]]
    # The last token's KV was never needed.
    assert serve_alone(rig, 2, a_sequence([*said, 5, 6, 7], 4)) == 24 - 20 and cached(rig, 2) == 20


def test_disabled_cache_finds_nothing() -> None:
    rig = Rig(SchedulerConfig(enable_prefix_caching=False), page_size=4)
    for handle in range(2):
        assert serve_alone(rig, handle, a_sequence(13, 4)) == 13
    load = rig.core.load()
    assert rig.core.names.sequence == 0 and rig.core.cached_pages == 0 and load.free_pages == load.pages


def test_skip_cache_read_and_salt_keep_prompts_apart() -> None:
    rig = Rig(page_size=4)
    assert serve_alone(rig, 1, a_sequence(13, 4, cache_salt="a")) == 13
    assert serve_alone(rig, 2, a_sequence(13, 4, cache_salt="b")) == 13
    assert serve_alone(rig, 3, a_sequence(13, 4)) == 13
    assert serve_alone(rig, 4, a_sequence(13, 4, cache_salt="a", skip_cache_read=True)) == 13
    assert serve_alone(rig, 5, a_sequence(13, 4, cache_salt="a")) == 1
    names = rig.core.names.pages(0)
    for salt in ("a", "b", ""):
        hashes = chain_hashes(a_sequence(13).prompt_ids, 4, PageExtras(salt=salt))
        assert all(digest in names for digest in hashes)


def test_pages_of_a_skip_cache_read_request_serve_others() -> None:
    rig = Rig(page_size=4)
    serve_alone(rig, 1, a_sequence(13, 4, skip_cache_read=True))
    assert serve_alone(rig, 2, a_sequence(13, 4)) == 1


def test_free_pages_are_used_before_cached_ones_and_tails_evicted_first() -> None:
    rig = Rig(num_pages=13, page_size=4, max_num_seqs=1)
    serve_alone(rig, 1, a_sequence(random_ids(17, 1), 1))
    serve_alone(rig, 2, a_sequence(random_ids(9, 2), 1))
    assert rig.core.cached_pages == 4 + 2
    # Five of the six other pages are enough.
    serve_alone(rig, 3, a_sequence(random_ids(17, 3), 1))
    assert rig.core.cached_pages == 4 + 2 + 4
    # Now the oldest prefix loses its tail.
    serve_alone(rig, 4, a_sequence(random_ids(13, 4), 1))
    assert serve_alone(rig, 5, a_sequence(random_ids(9, 2), 1)) == 1
    assert 4 <= serve_alone(rig, 6, a_sequence(random_ids(17, 1), 1)) - 1 < 16, "its head is still there"


def test_evicted_pages_lose_their_names() -> None:
    rig = Rig(num_pages=9, page_size=4, max_num_seqs=1)
    for seed in range(6):
        serve_alone(rig, seed, a_sequence(random_ids(21, seed), 4))
        held = {digest for piece in rig.core.names.snapshot() for chain in piece for digest in chain.hashes}
        for event in rig.core.names.events_after(0)[-1:]:
            assert not any(set(removed.hashes) & held for removed in event.removed)
        assert rig.core.names.num_named <= 8
    told: set[bytes] = set()
    for event in rig.core.names.events_after(0):
        told |= {digest for stored in event.stored for digest in stored.hashes}
        told -= {digest for removed in event.removed for digest in removed.hashes}
    assert told == set(rig.core.names.pages(0)), "events lead to what is held"


def test_promised_prefix_is_not_computed_twice() -> None:
    rig = Rig(SchedulerConfig(max_num_batched_tokens=8), page_size=4, max_num_seqs=4)
    for handle in range(4):
        rig.submit(handle, a_sequence(33, 6))
    rig.run()
    assert rig.core.stats.prefill_tokens == 33 + 3 * 1
    assert [cached(rig, handle) for handle in range(4)] == [0, 32, 32, 32]
    assert all(rig.tokens[0, h] == undisturbed(a_sequence(33, 6))[0] for h in range(4))
    assert rig.core.stats.pages_lost == 0


def test_a_longer_prompt_goes_on_where_the_shorter_one_ends() -> None:
    rig = Rig(SchedulerConfig(max_num_batched_tokens=8), page_size=4, max_num_seqs=4)
    for handle, tokens in enumerate((17, 33, 49)):
        rig.submit(handle, a_sequence(tokens, 6))
    rig.run()
    assert [cached(rig, handle) for handle in range(3)] == [0, 16, 32]
    assert rig.core.stats.prefill_tokens == 17 + 17 + 17


def started(rig: Rig, sequences: list[Sequence]) -> None:
    for handle, sequence in enumerate(sequences):
        rig.submit(handle, sequence)
    for _ in range(3):
        rig.step()
        rig.core.check_integrity()


@pytest.mark.parametrize("policy", ["credit", "lockstep"])
def test_consumer_restarts_when_its_producer_aborts(policy: str) -> None:
    config = SchedulerConfig(max_num_batched_tokens=8, lockstep=policy == "lockstep")
    rig = Rig(config, page_size=4, max_num_seqs=4, num_pages=200)
    started(rig, [a_sequence(49, 6) for _ in range(4)])
    assert rig.core._replica.slots.num_active == 4
    rig.core.abort(0, 0, rig.now)
    rig.core.check_integrity()
    rig.run()
    assert rig.core.stats.pages_lost == 3
    assert rig.ends[0, 0] is FinishReason.ABORT
    assert all(rig.tokens[0, h] == undisturbed(a_sequence(49, 6))[0] for h in (1, 2, 3))
    assert rig.core.stats.prefill_tokens <= 49 + 2 + 8, "two steps' work had no name yet at the most"


def test_consumer_survives_several_aborted_producers() -> None:
    """More often than a request may lose pages for which nobody answers."""
    rig = Rig(SchedulerConfig(max_num_batched_tokens=4), page_size=4, max_num_seqs=8, num_pages=400)
    started(rig, [a_sequence(80, 6) for _ in range(8)])
    for handle in range(7):
        rig.core.abort(0, handle, rig.now)
        for _ in range(3):
            rig.step()
            rig.core.check_integrity()
    rig.run()
    assert rig.tokens[0, 7] == undisturbed(a_sequence(80, 6))[0] and not rig.errors


def test_chain_of_consumers_restarts_together() -> None:
    rig = Rig(SchedulerConfig(max_num_batched_tokens=8), page_size=4, max_num_seqs=4, num_pages=200)
    sequences = [a_sequence(tokens, 6) for tokens in (33, 49, 65, 81)]
    started(rig, sequences)
    rig.core.abort(0, 0, rig.now)
    # The first pages have a name; what the others promised is void with what they waited for.
    hit = rig.core._replica.cache.match(rig.core._replica.requests[0, 3])
    assert 0 < hit.pages == hit.ready < 8
    rig.core.check_integrity()
    rig.run()
    assert all(rig.tokens[0, h] == undisturbed(sequences[h])[0] for h in (1, 2, 3))


def test_siblings_share_their_prompt() -> None:
    rig = Rig(page_size=4, max_num_seqs=8, num_pages=200)
    for sample in range(5):
        rig.submit(sample, a_sequence(41, 10))
    rig.step()
    tables = [start.pages[0].tolist() for start in rig.worker.seen[0].start]
    assert len(tables) == 5 and all(table[:10] == tables[0][:10] for table in tables)
    own = [page for table in tables for page in table[10:]]
    assert len(own) == len(set(own)) and not set(own) & set(tables[0][:10])
    rig.run()
    assert rig.core.stats.prefill_tokens == 41 + 4


def test_preempted_request_finds_its_own_pages() -> None:
    rig = Rig(num_pages=21, page_size=4, max_num_seqs=4)
    sequences = {handle: a_sequence(random_ids(14, handle), 30) for handle in range(4)}
    for handle, sequence in sequences.items():
        rig.submit(handle, sequence)
    rig.run()
    stats = rig.core.stats
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0, "some of them were still there"
    assert all(rig.tokens[0, h] == undisturbed(s, max_len=rig.core.max_len)[0] for h, s in sequences.items())
    assert all(cached(rig, handle) == 0 for handle in sequences), "each prompt was computed by its own request"


def test_migrated_request_finds_cached_pages_of_its_output() -> None:
    rig = Rig(page_size=4)
    whole = a_sequence(random_ids(10, 3), 20)
    serve_alone(rig, 1, whole)
    emitted = np.array(undisturbed(whole)[0][:15], np.int32)
    resumed = a_sequence(random_ids(10, 3), 20, output_ids=emitted)
    assert serve_alone(rig, 2, resumed) == 1, "25 tokens, of which 24 are on the device"
    assert cached(rig, 2) == 10, "as usage has it: prompt tokens"


def test_pages_of_an_aborted_request_are_found_again() -> None:
    """Also past what its client heard: a name says what is in the page, not who asked for it."""
    rig = Rig(page_size=4)
    rig.submit(1, a_sequence(13, 100))
    for _ in range(30):
        rig.step()
    heard = rig.tokens[0, 1]
    rig.core.abort(0, 1, rig.now)
    rig.run()
    pages = (13 + len(heard) - 1) // 4
    assert rig.core.names.num_named == pages > 3
    assert (
        serve_alone(rig, 2, a_sequence([*a_sequence(13).prompt_ids.tolist(), *heard, 5], 2))
        == 13 + len(heard) + 1 - 4 * pages
    )


def test_pages_that_the_worker_lost_are_not_found_again() -> None:
    rig = Rig(worker=FakeWorker(make_hello(page_size=4)))
    serve_alone(rig, 1, a_sequence(13, 4))
    rig.worker._lose_pages = 1.0
    rig.submit(2, a_sequence(13, 4))
    while not rig.core.stats.pages_lost:
        rig.step()
    rig.worker._lose_pages = 0.0
    assert rig.core.names.num_named == 1, "a page of the first answer alone"
    rig.run()
    assert rig.tokens[0, 2] == undisturbed(a_sequence(13, 4))[0] and cached(rig, 2) == 0


def moves(rig: Rig, kind: MoveKind) -> list[int]:
    return [len(move.device_page) for grant in rig.worker.seen for move in grant.move if move.kind is kind]


def test_device_pages_come_first_then_kvstore_pages() -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    serve_alone(first, 1, a_sequence(33, 4))
    rig = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    serve_alone(rig, 1, a_sequence(13, 4))
    assert moves(rig, MoveKind.LOAD) == [3]
    assert serve_alone(rig, 2, a_sequence(41, 4)) == 41 - 32 and cached(rig, 2) == 32
    assert moves(rig, MoveKind.LOAD) == [3, 5]
    stats = rig.core.stats
    assert (stats.prompt_computed, stats.prompt_local, stats.prompt_kvstore) == (1 + 9, 12, 12 + 20)
    asked = stats.cache_queries
    assert serve_alone(rig, 3, a_sequence(33, 4)) == 1
    assert stats.cache_queries == asked, "all of it was on the device"


def test_pages_being_loaded_are_shared() -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    serve_alone(first, 1, a_sequence(33, 4))
    rig = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    for handle in range(3):
        rig.submit(handle, a_sequence(33, 4))
    rig.run()
    assert moves(rig, MoveKind.LOAD) == [8]
    assert rig.core.stats.prefill_tokens == 3
    assert [cached(rig, handle) for handle in range(3)] == [32, 32, 32]


def test_load_fills_the_cache_after_its_request_left() -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    serve_alone(first, 1, a_sequence(33, 4))
    rig = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    rig.submit(1, a_sequence(33, 4))
    while not moves(rig, MoveKind.LOAD):
        rig.step()
    rig.core.abort(0, 1, rig.now)
    rig.core.check_integrity()
    rig.run()
    assert rig.core.names.num_named == 8
    assert serve_alone(rig, 2, a_sequence(33, 4)) == 1


@pytest.mark.parametrize("leaves", ["the loader leaves", "the loader is younger", "nobody leaves"])
def test_prefix_is_computed_once_after_a_failed_load(leaves: str) -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4), store=store))
    serve_alone(first, 1, a_sequence(65, 4))
    config = SchedulerConfig(max_num_batched_tokens=8, scheduling_policy="priority")
    rig = Rig(config, kvstore=True, worker=FakeWorker(make_hello(page_size=4, num_pages=200), store=store))
    rig.worker.refuse_moves, rig.worker.move_turns = True, (4, 5)
    rig.submit(1, a_sequence(65, 4))
    while not moves(rig, MoveKind.LOAD):
        rig.step()
    rig.submit(2, a_sequence(65, 4), priority=-1 if leaves == "the loader is younger" else 0)
    rig.step()
    rig.step()
    assert sum(len(grant.start) for grant in rig.worker.seen) == 2, "it waits for the same pages"
    if leaves == "the loader leaves":
        rig.core.abort(0, 1, rig.now)
    while rig.core.stats.prefill_tokens < 16:
        rig.step()
        rig.core.check_integrity()
    rig.submit(3, a_sequence(65, 4))
    rig.run()
    assert all(rig.tokens[0, h] == undisturbed(a_sequence(65, 4))[0] for h in (2, 3))
    assert rig.core.stats.prefill_tokens <= 65 + 2 + 3 * 4
