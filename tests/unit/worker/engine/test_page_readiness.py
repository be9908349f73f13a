"""Cached ranges: pages that another slot or a move is filling, and what happens when they do not come."""

from __future__ import annotations

import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, MoveKind, PageMove
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import LOCKSTEP, ROOMY, EngineBench, a_start

PROMPT = list(range(20, 33))  # 13 tokens: three full pages of 4, and one token
CHUNKED = Budget(1000, 1000, chunk_cap=4, partial_prefills=9, step_limit=1)


def says(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, count, 97)


def load(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*pages), tuple(bytes([p]) * 32 for p in pages))


def store(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.STORE, 0, ids(*pages), tuple(bytes([p]) * 32 for p in pages))


def fill(bench: EngineBench, first: int, *pages: int) -> None:
    """What a load of PROMPT's pages brings."""
    size = bench.spec.page_size
    for place, page in enumerate(pages, first):
        bench.runner.pages[page] = PROMPT[place * size : (place + 1) * size]


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=3))
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=3))
    told = bench.run()
    assert told.tokens[1] == says(3)
    assert bench.runner.batches[-3].position.tolist() == [12]


def test_the_last_known_token_is_always_computed() -> None:
    bench = EngineBench()
    prompt = PROMPT[:12]
    bench.grant(a_start(0, prompt, [1, 2, 3, 4], max_tokens=2))
    bench.run()
    bench.grant(a_start(1, prompt, [1, 2, 3, 5], cached=12, max_tokens=2))
    assert bench.run().tokens[1] == says(2, prompt)


def test_a_consumer_waits_for_its_producer_and_not_longer() -> None:
    bench = EngineBench()
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=6),
        a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=6),
        budget=CHUNKED,
    )
    positions = []
    for _ in range(5):
        bench.run()
        positions.append(bench.runner.batches[-1].position.tolist())
        bench.grant()
    bench.grant(budget=ROOMY)
    told = bench.run()
    assert positions == [[0], [4], [8], [12, 12], [13, 13]]
    assert told.tokens == {0: says(6), 1: says(6)}
    assert told.errors == []


def test_what_an_earlier_holder_left_in_a_page_is_not_taken_for_the_producers() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, [9] * 13, [1, 2, 3, 4], max_tokens=1))
    bench.run()
    bench.grant(
        a_start(1, PROMPT, [1, 2, 3, 5, 6], max_tokens=3),
        a_start(2, PROMPT, [1, 2, 3, 7, 8], cached=12, max_tokens=3, key=-1),
        budget=CHUNKED,
    )
    bench.run()
    bench.grant(budget=ROOMY)
    assert bench.run().tokens == {0: says(1, [9] * 13), 1: says(3), 2: says(3)}


def test_what_was_in_the_pages_of_a_refused_producer_is_not_taken_for_its_own() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, [7] * 13, [1, 2, 3, 4, 5], max_tokens=2))
    bench.run()
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=3, max_model_len=1000),
        a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=3),
    )
    told = bench.run()
    assert told.codes() == [(0, "BAD_CONTEXT_LENGTH"), (1, "PAGES_LOST")] and 1 not in told.tokens


def test_what_was_in_the_pages_of_an_impossible_load_is_not_taken_for_its_own() -> None:
    bench = EngineBench(transfer_agent=FakeTransferAgent())
    bench.grant(a_start(0, [7] * 13, [1, 2, 3, 4, 5], max_tokens=2))
    bench.run()
    without_names = PageMove(1, MoveKind.LOAD, 0, ids(1, 2, 3))
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=3), move=(without_names,))
    told = bench.run()
    assert told.codes() == [(1, "PAGES_LOST")] and 1 not in told.tokens


def test_a_refused_start_leaves_the_pages_of_others_alone() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=8, limit=14))
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], max_tokens=3))
    bench.grant(limit={0: 1000})
    told = bench.run()
    assert told.codes() == [(1, "PAGE_TAKEN")] and told.tokens[0] == says(8)
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=3))
    assert bench.run().tokens[1] == says(3)


def test_waiting_is_not_stalling() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1, 2, 3),))
    told = bench.run()
    assert (told.reports[-1].stalled_slot.tolist(), told.reports[-1].running, told.tokens) == ([], 1, {})
    fill(bench, 0, 1, 2, 3)
    transfer_agent.end(7)
    assert bench.run().tokens[0] == says(8)
    assert told.moved == {7: (0, 3)} and bench.runner.batches[0].position.tolist() == [12]


def test_a_partial_load_shortens_the_cached_range() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1, 2, 3),))
    fill(bench, 0, 1)
    bench.run()
    transfer_agent.end(7, pages=1)
    told = bench.run()
    assert told.tokens[0] == says(8) and told.errors == []
    assert told.moved == {7: (1, 1)} and bench.runner.batches[0].position.tolist() == [4]


def test_a_range_of_two_loads_is_judged_when_both_have_ended() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1), load(8, 2, 3)))
    bench.run()
    transfer_agent.end(7, pages=0)
    assert bench.run().tokens == {}  # page 2 or 3 may be written at any moment
    transfer_agent.end(8, pages=2)
    told = bench.run()
    assert told.tokens == {0: says(8)} and bench.runner.batches[0].position.tolist() == [0]


def test_after_a_failed_load_what_comes_before_it_is_still_awaited() -> None:
    """Page 1 comes by another slot's load, pages 2 and 3 would have come by this one's."""
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT[:5], [1, 6, 7], cached=4, max_tokens=1), move=(load(7, 1),))
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(8, 2, 3),))
    bench.run()
    transfer_agent.end(8, pages=0)
    assert bench.run().tokens == {}
    fill(bench, 0, 1)
    transfer_agent.end(7)
    told = bench.run()
    assert told.tokens[1] == says(8) and told.errors == []
    assert all(position >= 4 for batch in bench.runner.batches for position in batch.position)


def test_after_a_failed_load_what_another_slot_computes_before_it_is_still_awaited() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 6, 7]), budget=CHUNKED)
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(8, 3),))
    transfer_agent.end(8, pages=0)
    told = bench.run()
    bench.grant(budget=ROOMY)
    told = bench.run()
    assert told.tokens[1] == says(8) and told.errors == []


def test_who_recomputes_a_failed_load_is_the_producer_of_its_pages() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1, 2, 3),), budget=CHUNKED)
    bench.run()
    transfer_agent.end(7, pages=0)
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12), budget=ROOMY)
    told = bench.run()
    assert told.tokens == {0: says(8), 1: says(8)} and told.errors == []


def test_the_page_in_which_a_cached_range_ends_is_the_slots_own() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=10), move=(load(7, 1, 2), load(8, 3)))
    fill(bench, 0, 1, 2, 3)
    bench.run()
    transfer_agent.end(8)
    bench.run()
    bench.grant(a_start(1, PROMPT, [3, 20, 21, 22]))
    transfer_agent.end(7)
    told = bench.run()
    assert told.codes() == [(1, "PAGE_TAKEN")] and told.tokens == {0: says(8)}
    assert bench.runner.batches[0].position.tolist() == [10]


@pytest.mark.parametrize("full", [True, False])
def test_a_refused_load_is_a_failed_one(full: bool) -> None:
    transfer_agent = FakeTransferAgent()
    transfer_agent.full = full
    bench = EngineBench(transfer_agent=transfer_agent if full else None)
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1, 2, 3),))
    told = bench.run()
    assert told.tokens[0] == says(8) and told.moved == {7: (1, 0)} and told.errors == []


def test_stale_pages_of_a_load_are_not_taken_for_new_ones() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, [9] * 13, [1, 2, 3, 4, 5], max_tokens=1))
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, max_tokens=2), move=(load(7, 1, 2, 3),))
    bench.run()
    assert 1 not in bench.told.tokens
    fill(bench, 0, 1, 2, 3)
    transfer_agent.end(7)
    assert bench.run().tokens[1] == says(2)


def test_of_two_that_share_a_failed_load_the_oldest_recomputes() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12, key=2),
        a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12, key=1),
        move=(load(7, 1, 2, 3),),
    )
    bench.run()
    transfer_agent.end(7, pages=0)
    told = bench.run()
    assert told.codes() == [(0, "PAGES_LOST")] and told.tokens == {1: says(8)}


def test_when_a_producer_stops_its_consumers_are_told() -> None:
    bench = EngineBench()
    bench.grant(
        a_start(0, PROMPT, [1, 2, 3, 4]), a_start(1, PROMPT, [1, 2, 3, 6], cached=12), a_start(2, [7], [8, 9, 10]),
        budget=CHUNKED,
    )  # fmt: skip
    bench.run()
    bench.grant(stop=(0,), budget=ROOMY)
    told = bench.run()
    assert told.codes() == [(1, "PAGES_LOST")] and told.tokens[2] == says(8, [7])


def test_what_a_stopped_producer_had_finished_stays() -> None:
    bench = EngineBench()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), budget=CHUNKED)
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 6, 7, 8, 9], cached=4), stop=(0,), budget=ROOMY)
    assert bench.run().tokens[1] == says(8)


def test_a_page_that_is_being_filled_cannot_be_granted_for_writing() -> None:
    bench = EngineBench(transfer_agent=FakeTransferAgent())
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], cached=12), move=(load(7, 1, 2, 3),))
    bench.grant(
        a_start(1, PROMPT, [2, 20, 21, 22]),  # awaited by the load
        a_start(2, PROMPT, [23, 24, 25, 4]),  # slot 0 will write it
        a_start(3, PROMPT, [30, 31, 32, 33, 34]),
    )
    told = bench.run()
    assert told.codes() == [(1, "PAGE_TAKEN"), (2, "PAGE_TAKEN")] and told.tokens == {3: says(8)}


def test_a_page_that_a_running_slot_reads_is_neither_granted_nor_loaded() -> None:
    bench = EngineBench(transfer_agent=FakeTransferAgent())
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=1), budget=LOCKSTEP)
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 6, 7], cached=12))
    bench.run()
    bench.grant(a_start(2, PROMPT, [2, 20, 21, 22]), move=(load(8, 3),))
    told = bench.run()
    assert told.codes() == [(2, "PAGE_TAKEN")] and told.moved == {8: (1, 0)}
    bench.grant(budget=ROOMY)
    assert bench.run().tokens[1] == says(8)


def test_stores_take_whole_pages_only() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5], max_tokens=1))
    bench.run()
    bench.grant(move=(store(1, 1, 2, 3), store(2, 3, 4), store(3, 0), store(4, 64)))
    told = bench.run()
    assert sorted(told.moved) == [2, 3, 4] and set(told.moved.values()) == {(1, 0)}
    transfer_agent.end(1)
    assert bench.run().moved[1] == (0, 3)


def test_malformed_and_unknown_moves_fail_alone() -> None:
    bench = EngineBench(transfer_agent=FakeTransferAgent())
    bench.grant(
        move=(
            load(1, 1),
            PageMove(2, MoveKind.LOAD, 0, ids(2, 3), (b"h" * 32,)),
            PageMove(3, MoveKind.LOAD, 1, ids(4), (b"h" * 32,)),
            PageMove(4, MoveKind.COPY, 0, ids(4), (b"h" * 32,)),
            load(5, 1),
            load(6, 9, 9),
        )
    )
    told = bench.run()
    assert told.moved == dict.fromkeys((2, 3, 4, 5, 6), (1, 0))
    bench.grant(move=(load(1, 10),))  # an id that is still in use
    assert bench.run().moved[1] == (1, 0)


def test_a_new_run_cancels_moves() -> None:
    bench = EngineBench(transfer_agent=(transfer_agent := FakeTransferAgent()))
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], cached=12), move=(load(7, 1, 2, 3),))
    bench.run()
    transfer_agent.end(7)  # ended, but not collected before the run did
    bench.engine.begin_run()
    assert transfer_agent.cancelled == 1 and bench.step() is None
    bench.seq = 0
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5]))
    assert bench.run().moved == {} and bench.told.tokens[0] == says(8)
