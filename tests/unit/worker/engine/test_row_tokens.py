"""Rows that draw no token, one or several: right drafts are kept, and held rows are as if they had not run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from quire_common.credit import Budget, Finish
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling
from quire_worker.engine.device import InlineDevice
from quire_worker.engine.ports import Runner
from quire_worker.engine.stop_rule import keep_tokens
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch
from tests.fakes.worker.counting_runner import continuation
from tests.fakes.worker.engine_bench import EngineBench, a_start, small_spec

PROMPT, PAGES, VOCAB = [5, 6, 7], list(range(1, 10)), 97
ANSWER = continuation(PROMPT, 30, VOCAB)


class Oracle:
    """Drafts the right answer of one prompt, but for the places in `wrong`; holds rows at the turns in `held`."""

    constrained_only = False

    def __init__(self, answer: list[int], wrong: Iterable[int] = (), held: Iterable[int] = ()) -> None:
        self.tokens = [*PROMPT, *answer]
        self.wrong = {len(PROMPT) + place for place in wrong}
        self.turns_held, self.turn = set(held), -1
        self.batches: list[tuple[int, int]] = []
        """(position, count) of each step's only row."""

    def propose(self, batch: StepBatch) -> np.ndarray:
        first = int(batch.position[0]) + 1
        drafts = [
            (self.tokens[place] + (place in self.wrong)) % VOCAB if place < len(self.tokens) else 0
            for place in range(first, first + int(batch.drafts[0]))
        ]
        return np.array([drafts], np.int32)

    def held(self, batch: StepBatch) -> np.ndarray:
        self.turn += 1
        self.batches.append((int(batch.position[0]), int(batch.count[0])))
        return np.full(len(batch.count), self.turn in self.turns_held)


def a_bench(oracle: Oracle, row_tokens: int = 4, depth: int = 1) -> EngineBench:
    def device(runner: Runner) -> InlineDevice:
        return InlineDevice(runner, oracle, oracle)

    return EngineBench(small_spec(max_row_tokens=row_tokens), depth=depth, device=device)


def row_counts(bench: EngineBench) -> list[int]:
    return [count for report in bench.told.reports for count in report.count.tolist()]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrong", [(), range(30), (1, 2, 6)])
@pytest.mark.parametrize("held", [(), (0,), (1, 2, 5)])
def test_answer_depends_neither_on_drafts_nor_on_held_rows(
    depth: int, wrong: Iterable[int], held: Iterable[int]
) -> None:
    bench = a_bench(Oracle(ANSWER, wrong, held), depth=depth)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=20))
    told = bench.run()
    assert told.tokens == {0: ANSWER[:20]} and told.finish == {0: Finish.LENGTH}


def test_row_keeps_its_drafts_up_to_the_first_wrong_one_and_one_token_more() -> None:
    bench = a_bench(Oracle(ANSWER, wrong=[2]))
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=10))
    bench.run()
    # The prompt's row, then 1 right draft and what the model draws behind it; then 3 and one more.
    assert row_counts(bench) == [1, 2, 4, 3]


def test_held_row_is_not_reported_and_computes_its_position_again() -> None:
    oracle = Oracle(ANSWER, held=[0, 2, 3])
    bench = a_bench(oracle, row_tokens=1)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=3))
    told = bench.run()
    assert [report.slot.tolist() for report in told.reports if report.steps] == [[], [0], [], [], [0], [0]]
    assert told.tokens == {0: ANSWER[:3]}
    assert [position for position, _ in oracle.batches] == [0, 2, 3, 3, 3, 4]


def test_page_is_not_ready_before_the_token_behind_its_last_position_was_drawn() -> None:
    bench = a_bench(Oracle(ANSWER, held=[0]))
    bench.grant(a_start(0, [*PROMPT, 8], [1, 2, 3], max_tokens=5), budget=Budget(100, 100, 100, 4, step_limit=1))
    bench.step()
    assert bench.engine.residents.states.ready[1] == 3, "the last position will be written again"
    assert bench.told.prefill == {0: 3}


def test_row_tries_no_more_than_its_credit() -> None:
    oracle = Oracle(ANSWER)
    bench = a_bench(oracle)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=20, limit=5))
    told = bench.run()
    assert oracle.batches == [(0, 3), (3, 2)] and told.tokens == {0: ANSWER[:3]}
    assert told.reports[-1].stalled_slot.tolist() == [0]
    bench.grant(limit={0: 6})
    assert bench.run().tokens == {0: ANSWER[:4]}, "one position more is one row of one token"


def test_rows_take_what_the_budget_has_left_behind_prompts() -> None:
    oracle = Oracle(ANSWER)
    bench = a_bench(oracle)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=20), budget=Budget(3, 100, 100, 4))
    bench.step()
    bench.grant(a_start(1, [9] * 4, [20, 21], max_tokens=1, key=1))
    bench.run()
    assert oracle.batches[:4] == [(0, 3), (3, 1), (4, 1), (5, 3)], "two steps beside a prompt of two tokens each"


def test_row_ends_with_a_stop_id_inside_it() -> None:
    stop = ANSWER[5]
    bench = a_bench(Oracle(ANSWER))
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=20, stop=(stop,)))
    told = bench.run()
    assert told.tokens == {0: ANSWER[: ANSWER.index(stop) + 1]} and told.finish == {0: Finish.STOP}


def test_no_drafts_are_tried_before_min_tokens() -> None:
    blocked = ANSWER[1]
    oracle = Oracle(ANSWER)
    bench = a_bench(oracle)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=12, min_tokens=6, stop=(blocked,)))
    told = bench.run()
    assert blocked not in told.tokens[0][:6]
    assert all(count == 1 for position, count in oracle.batches[1:] if position + 1 < len(PROMPT) + 6)


def test_no_drafts_are_tried_where_logits_depend_on_what_was_drawn() -> None:
    oracle = Oracle(ANSWER)
    bench = a_bench(oracle)
    controls = LogitControls(presence_penalty=0.5)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=6, sampling=Sampling(controls=controls)))
    bench.run()
    assert [count for _, count in oracle.batches] == [3, 1, 1, 1, 1, 1]


def test_logprobs_come_with_each_kept_token_and_with_no_other() -> None:
    bench = a_bench(Oracle(ANSWER, wrong=[3], held=[1]))
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=9, sampling=Sampling(logprobs=1)))
    told = bench.run()
    told_of = [token for report in told.reports if report.logprobs for token in report.logprobs.top_id.tolist()]
    places = [report.logprobs.token_index.tolist() for report in told.reports if report.logprobs]
    assert told_of == told.tokens[0] == ANSWER[:9]
    assert places == [[*range(len(each))] for each in places]


def test_stopped_sequence_still_tells_the_tokens_of_its_row_in_flight() -> None:
    bench = a_bench(Oracle(ANSWER), depth=2)
    bench.grant(a_start(0, PROMPT, PAGES, max_tokens=20))
    while bench.engine.launch():
        pass
    bench.grant(stop=(0,))
    told = bench.run()
    assert told.tokens == {0: ANSWER[:5]}, "one of the prompt's row, and four of the next"


def a_row(drafts: list[int], *, bound: int = 100, stop: list[int] | None = None) -> StepBatch:
    """A decode row with these drafts."""
    return StepBatch(
        token=np.array([1, *drafts], np.int64),
        count=np.array([1 + len(drafts)], np.int32),
        position=np.array([10], np.int32),
        page_table=np.array([[1]], np.int32),
        sample=np.ones(1, np.bool_),
        params=param_rows(1),
        logprobs=np.full(1, -1, np.int32),
        drafts=np.array([len(drafts)], np.int32),
        slot=np.zeros(1, np.int32),
        fed=np.ones(1, np.bool_),
        last=np.array([bound <= 11]),
        bound=np.array([bound], np.int32),
        min_len=np.zeros(1, np.int32),
        stop_id=np.array([stop or [-1]], np.int32),
    )


@pytest.mark.parametrize(
    ("drafts", "sampled", "kept", "finish"),
    [
        ([7, 8], [7, 8, 9], [7, 8, 9], Finish.NONE),
        ([7, 8], [7, 5, 9], [7, 5, -1], Finish.NONE),
        ([6, 8], [7, 8, 9], [7, -1, -1], Finish.NONE),
        ([7, 8], [7, -1, 9], [7, -1, -1], Finish.NONE),
    ],
)
def test_what_is_kept_of_a_row(drafts: list[int], sampled: list[int], kept: list[int], finish: Finish) -> None:
    found = keep_tokens(a_row(drafts), np.array([sampled], np.int32), None)
    assert (found.token.tolist(), found.finish.tolist()) == ([kept], [finish])


@pytest.mark.parametrize(("bound", "kept"), [(11, [7, -1, -1]), (12, [7, 8, -1]), (13, [7, 8, 9])])
def test_row_ends_by_length_at_its_bound(bound: int, kept: list[int]) -> None:
    found = keep_tokens(a_row([7, 8], bound=bound), np.array([[7, 8, 9]], np.int32), None)
    assert (found.token.tolist(), found.finish.tolist()) == ([kept], [Finish.LENGTH])


def test_held_row_keeps_nothing_and_does_not_end() -> None:
    row = a_row([7, 8], bound=11, stop=[7])
    found = keep_tokens(row, np.array([[7, 8, 9]], np.int32), np.ones(1, np.bool_))
    assert (found.token.tolist(), found.tokens.tolist(), found.finish.tolist()) == ([[-1, -1, -1]], [0], [Finish.NONE])
