"""Exports and pulls as the engine sees them: what is offered and when, who may write what, and each end told once."""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Budget, Grant, MoveKind, PageMove
from tests.fakes.kv_transfer.fake_transfer_agent import FakeTransferAgent
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import ROOMY, EngineBench, a_start

PROMPT = list(range(20, 34))  # 14 tokens: three full pages of 4, and two tokens
TAIL = 2
CHUNKED = Budget(1000, 1000, chunk_cap=4, partial_prefills=9, step_limit=1)


def says(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, count, 97)


def export(move_id: int, *pages: int, tail: int = TAIL) -> PageMove:
    hashes = tuple(bytes([page]) * 32 for page in pages)
    return PageMove(move_id, MoveKind.EXPORT, 0, ids(*pages), hashes, tail_tokens=tail, lease_key=b"k" * 32)


def pull(move_id: int, *pages: int, tail: int = TAIL) -> PageMove:
    hashes = tuple(bytes([page]) * 32 for page in pages)
    return PageMove(move_id, MoveKind.PULL, 0, ids(*pages), hashes, tail_tokens=tail, lease_key=b"k" * 32)


def load(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.LOAD, 0, ids(*pages), tuple(bytes([page]) * 32 for page in pages))


def bring(bench: EngineBench, *pages: int) -> None:
    """What a pull of PROMPT's pages brings."""
    size = bench.spec.page_size
    for place, page in enumerate(pages):
        tokens = PROMPT[place * size : (place + 1) * size]
        bench.runner.pages[page, : len(tokens)] = tokens


@pytest.fixture
def transfer_agent() -> FakeTransferAgent:
    return FakeTransferAgent()


@pytest.fixture
def bench(transfer_agent: FakeTransferAgent) -> EngineBench:
    return EngineBench(transfer_agent=transfer_agent)


def cut(bench: EngineBench, *move_ids: int) -> None:
    bench.seq += 1
    bench.engine.apply(Grant(bench.engine.epoch, bench.seq, cancel_move=np.array(move_ids, np.int64)))


def test_pages_are_offered_as_they_are_filled_and_the_last_when_its_tokens_are(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), move=(export(1, 1, 2, 3, 4),), budget=CHUNKED)
    offered = []
    for _ in range(4):
        bench.run()
        offered.append(transfer_agent.offered.get(1))
        bench.grant()
    assert offered == [1, 2, 3, 4]


def test_a_page_that_is_less_than_full_is_not_offered_as_a_whole_one(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], limit=14), move=(export(1, 1, 2, 3, 4, tail=0), export(2, 4, tail=3)))
    bench.run()
    assert transfer_agent.offered == {1: 3}
    bench.grant(limit={0: 15})
    bench.run()
    assert transfer_agent.offered == {1: 3, 2: 1}


def test_what_was_in_the_pages_before_is_not_offered(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(a_start(0, [9] * 14, [1, 2, 3, 4], max_tokens=1))
    bench.run()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), move=(export(1, 1, 2, 3, 4),), budget=CHUNKED)
    bench.run()
    assert transfer_agent.offered == {1: 1}


def test_pages_that_are_there_already_are_offered_at_once(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1))
    bench.run()
    bench.grant(move=(export(1, 1, 2, 3, 4),))
    bench.run()
    assert transfer_agent.offered == {1: 4}


def test_lent_pages_are_nobodys_to_fill_until_the_export_is_over(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1), move=(export(1, 1, 2, 3, 4), export(2, 1, tail=0)))
    bench.run()
    bench.grant(a_start(1, [5] * 6, [9, 3]), move=(load(3, 2), pull(4, 4)))
    told = bench.run()
    assert told.codes() == [(1, "PAGE_TAKEN")] and told.moved == {3: (1, 0), 4: (1, 0)}
    transfer_agent.end(1)
    bench.run()
    bench.grant(a_start(2, [5] * 6, [9, 3], max_tokens=1), a_start(3, [5], [1]))
    told = bench.run()
    assert told.codes() == [(1, "PAGE_TAKEN"), (3, "PAGE_TAKEN")] and told.moved[1] == (0, 4)
    assert told.tokens[2] == says(1, [5] * 6)


def test_a_prefill_that_begins_again_fills_the_same_pages(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), move=(export(1, 1, 2, 3, 4),), budget=CHUNKED)
    bench.run()
    bench.grant(stop=(0,))
    bench.run()
    bench.grant(a_start(1, PROMPT, [1, 2, 3, 4], cached=4, max_tokens=1), budget=ROOMY)
    told = bench.run()
    assert transfer_agent.offered == {1: 4} and told.tokens == {1: says(1)} and told.errors == []


def test_who_goes_on_with_its_own_exported_tail_may(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1), move=(export(1, 1, 2, 3, 4),))
    bench.run()
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 5, 6], output=tuple(says(1)), cached=14))
    assert bench.run().tokens[0] == says(8)


def test_a_slot_that_ends_early_leaves_an_export_unfilled_until_it_is_cancelled(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4]), move=(export(1, 1, 2, 3, 4),), budget=CHUNKED)
    bench.run()
    bench.grant(stop=(0,))
    bench.run()
    assert transfer_agent.offered == {1: 1} and bench.told.moved == {}
    cut(bench, 1, 77)
    assert bench.run().moved == {1: (1, 0)}
    cut(bench, 1)
    bench.run()
    assert [report.moved_id.tolist() for report in bench.told.reports if len(report.moved_id)] == [[1]]


def test_what_was_pulled_is_gone_on_with_in_the_middle_of_its_last_page(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(move=(pull(1, 11, 12, 13, 14),))
    bench.run()
    bring(bench, 11, 12, 13, 14)
    transfer_agent.end(1)
    assert bench.run().moved == {1: (0, 4)}
    bench.grant(a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], output=tuple(says(1)), cached=14))
    told = bench.run()
    assert says(1) + told.tokens[0] == says(8) and bench.runner.batches[0].position.tolist() == [14]


def test_nobody_starts_on_positions_that_a_pulled_page_has_not(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(move=(pull(1, 11, 12, 13, 14),))
    bring(bench, 11, 12, 13, 14)
    transfer_agent.end(1)
    bench.run()
    bench.grant(a_start(0, [*PROMPT, 1, 2], [11, 12, 13, 14, 15], cached=15))
    assert bench.run().codes() == [(0, "PAGES_LOST")]


def test_what_was_not_pulled_is_computed(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(move=(pull(1, 11, 12, 13, 14),))
    bring(bench, 11, 12)
    transfer_agent.end(1, pages=2)
    assert bench.run().moved == {1: (1, 2)}
    bench.grant(a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], output=tuple(says(1)), cached=14))
    told = bench.run()
    assert says(1) + told.tokens[0] == says(8) and bench.runner.batches[0].position.tolist() == [8]


def test_a_start_may_wait_for_its_pull(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(
        a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], output=tuple(says(1)), cached=14),
        move=(pull(1, 11, 12, 13, 14),),
    )
    assert bench.run().tokens == {}
    bring(bench, 11, 12, 13, 14)
    transfer_agent.end(1)
    assert says(1) + bench.run().tokens[0] == says(8)


def test_a_pull_is_not_written_to_pages_that_somebody_has(
    bench: EngineBench, transfer_agent: FakeTransferAgent
) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], limit=9), move=(pull(1, 11, 12),))
    bench.run()
    bench.grant(move=(pull(2, 3, 20), pull(3, 12, 20), pull(4, 20, 20), pull(5, 0), pull(6, 64), pull(7)))
    assert bench.run().moved == dict.fromkeys((2, 3, 4, 5, 6, 7), (1, 0))
    assert list(transfer_agent.taken) == [1]


def test_pages_that_are_being_pulled_are_nobodys_to_fill(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(a_start(0, PROMPT, [11, 12, 13, 14]), move=())
    bench.run()
    bench.grant(stop=(0,), move=(pull(1, 21, 22, 23, 24),))
    bench.grant(a_start(1, PROMPT, [5, 6, 7, 22]))
    assert bench.run().codes() == [(1, "PAGE_TAKEN")]


@pytest.mark.parametrize("tail", [-1, 4])
def test_a_tail_is_less_than_a_page(bench: EngineBench, transfer_agent: FakeTransferAgent, tail: int) -> None:
    bench.grant(move=(pull(1, 11, tail=tail), export(2, 12, tail=tail), export(3)))
    assert bench.run().moved == dict.fromkeys((1, 2, 3), (1, 0)) and not transfer_agent.taken


def test_a_pull_that_is_cancelled_keeps_what_has_come(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(move=(pull(1, 11, 12, 13, 14),))
    bench.run()
    cut(bench, 1)
    assert bench.run().moved == {1: (1, 0)}
    bench.grant(a_start(0, PROMPT, [11, 12, 13, 14, 15], cached=14, max_tokens=1))
    assert bench.run().tokens[0] == says(1)


def test_a_new_run_knows_of_no_export_and_no_pull(bench: EngineBench, transfer_agent: FakeTransferAgent) -> None:
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1), move=(export(1, 1, 2, 3, 4), pull(2, 11, 12, 13, 14)))
    bench.run()
    bench.engine.begin_run()
    bench.engine.check_integrity()
    bench.seq = 0
    bench.grant(a_start(0, PROMPT, [1, 2, 3, 4, 11, 12]))
    told = bench.run()
    assert transfer_agent.cancelled == 1 and told.moved == {} and told.tokens[0][-8:] == says(8)
