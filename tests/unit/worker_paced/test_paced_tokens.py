"""Tokens of the paced worker: equal to the pure answer in any company, chunking and paging, and to nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_common.credit import Finish
from quire_common.sequence import Sampling, Stop
from quire_worker.paced.answer import paced_tokens
from quire_worker.paced.facts import PacedFacts
from tests.unit.worker_paced.driver import PAGE_SIZE, VOCAB, Row, a_runner, finish, step

FACTS = PacedFacts(VOCAB, (1,), 512)
SEEDED = Sampling(temperature=0.7, seed=5)


def pure(prompt: list[int], count: int, sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008 - frozen
    return paced_tokens(prompt, Stop(count, ignore_eos=True), sampling, facts=FACTS).tokens


def pages(rng: np.random.Generator, taken: set[int], tokens: int) -> list[int]:
    free = [page for page in rng.permutation(199) + 1 if page not in taken][: -(-tokens // PAGE_SIZE)]
    taken.update(free)
    return [int(page) for page in free]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_company_chunking_and_paging_gives_the_pure_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runner, taken, rows, wanted = a_runner(), set[int](), [], []
    for _ in range(int(rng.integers(1, 6))):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        sampling = Sampling(temperature=float(rng.integers(0, 2)), seed=int(rng.integers(2**63)), sample=1)
        rows.append(Row(list(prompt), pages(rng, taken, len(prompt) + 20), sampling))
        wanted.append(prompt + pure(prompt, 20, sampling))
    while any(len(row.tokens) < len(want) for row, want in zip(rows, wanted, strict=True)):
        ready = [row for row, want in zip(rows, wanted, strict=True) if len(row.tokens) < len(want)]
        chosen = [row for row in ready if rng.random() < 0.7] or ready
        step(runner, chosen, [int(rng.integers(1, len(row.tokens) - row.computed + 1)) for row in chosen])
    assert [row.tokens for row in rows] == wanted


def test_every_token_of_the_prefix_counts() -> None:
    prompt = list(range(40))
    base = pure(prompt, 8)
    for place in range(40):
        changed = list(prompt)
        changed[place] += 500
        assert pure(changed, 8) != base
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    assert pure(swapped, 8) != base


def test_pages_that_another_sequence_filled_with_the_same_prefix_serve_as_well() -> None:
    prompt = list(range(100, 100 + 4 * PAGE_SIZE))
    runner = a_runner()
    first = Row(list(prompt), [1, 2, 3, 4, 5, 6])
    finish(runner, first, 4)
    second = Row([*prompt, 7], [1, 2, 3, 4, 9, 10], computed=len(prompt))
    assert finish(runner, second, 4) == pure([*prompt, 7], 4)


@pytest.mark.parametrize("wrong", range(5))
def test_a_wrong_page_gives_other_tokens(wrong: int) -> None:
    """The last page at once, an earlier one when a probe comes by."""
    prompt = list(range(5 * PAGE_SIZE - 2))
    runner = a_runner()
    finish(runner, Row(list(range(300, 330)), list(range(20, 29))), 2)
    row = Row(list(prompt), [1, 2, 3, 4, 5, *range(6, 20)])
    finish(runner, row, 1)
    row.pages[wrong] = 20 + wrong
    assert finish(runner, row, 30) != pure([*prompt, row.tokens[len(prompt)]], 30)


def test_a_page_overwritten_too_early_gives_other_tokens() -> None:
    prompt = list(range(3 * PAGE_SIZE))
    runner = a_runner()
    row = Row(list(prompt), [1, 2, 3, 4, 5, 6, 7, 8, 9])
    finish(runner, row, 2)
    finish(runner, Row([8, 9], [2]), 1)
    assert finish(runner, row, 20) != pure(prompt, 22)[2:]


def test_a_wrong_token_fed_back_gives_other_tokens() -> None:
    prompt = [4, 5, 6]
    runner, row = a_runner(), Row([4, 5, 6], [1, 2, 3, 4])
    finish(runner, row, 2)
    row.tokens[-1] = (row.tokens[-1] + 1) % VOCAB
    assert finish(runner, row, 4) != pure(prompt, 6)[2:]


def test_running_positions_twice_changes_nothing() -> None:
    prompt = list(range(10))
    runner, row = a_runner(), Row(list(range(10)), [1, 2, 3, 4, 5])
    finish(runner, row, 3)
    row.tokens.pop()
    row.computed -= 1
    finish(runner, row, 3)
    assert row.tokens[10:] == pure(prompt, 5)


def test_greedy_ignores_the_seed_and_others_do_not() -> None:
    prompt = [1, 2, 3]
    assert pure(prompt, 8, Sampling(seed=9, sample=4)) == pure(prompt, 8)
    answers = [
        pure(prompt, 8, sampling)
        for sampling in (Sampling(), SEEDED, Sampling(0.7, seed=6), Sampling(0.7, seed=5, sample=1))
    ]
    assert len({tuple(answer) for answer in answers}) == 4


def test_an_answer_goes_on_from_what_was_emitted() -> None:
    prompt, stop = list(range(20)), Stop(12, ignore_eos=True)
    whole = pure(prompt, 12, SEEDED)
    for cut in (1, 5, 11):
        rest = paced_tokens(prompt, stop, SEEDED, output_ids=whole[:cut], facts=FACTS)
        assert whole[:cut] + rest.tokens == whole and rest.finish == Finish.LENGTH


def test_stop_ids_end_an_answer_and_are_not_drawn_before_min_tokens() -> None:
    prompt = list(range(20))
    whole = pure(prompt, 12)
    ended = paced_tokens(prompt, Stop(12, stop_token_ids=(whole[4],), ignore_eos=True), facts=FACTS)
    assert (ended.tokens, ended.finish) == (whole[:5], Finish.STOP)
    later = paced_tokens(prompt, Stop(12, min_tokens=8, stop_token_ids=(whole[4],), ignore_eos=True), facts=FACTS)
    assert later.tokens[:4] == whole[:4] and whole[4] not in later.tokens[:8]
    row = Row([*prompt, *whole[:4]], list(range(1, 20)), blocked=(whole[4],))
    assert finish(a_runner(), row, 1) == later.tokens[4:5]


def test_a_vocabulary_that_is_nearly_all_blocked_still_gives_a_token() -> None:
    row = Row([0, 1, 2], [1, 2], blocked=tuple(token for token in range(VOCAB) if token != 700))
    assert finish(a_runner(), row, 1) == [700]


def test_the_end_of_sequence_comes_once_in_a_vocabulary_unless_ignored() -> None:
    facts = PacedFacts(50, (3,), 10_000)
    lengths = [len(paced_tokens([n], Stop(2000), facts=facts).tokens) for n in range(300)]
    assert 40 < np.mean(lengths) < 60
    assert len(paced_tokens([1], Stop(400, ignore_eos=True), facts=facts).tokens) == 400


def test_the_context_and_prefill_only_end_an_answer() -> None:
    short = PacedFacts(VOCAB, (), 10)
    assert paced_tokens([1, 2, 3], Stop(100), facts=short).finish == Finish.LENGTH
    assert len(paced_tokens([1, 2, 3], Stop(100), facts=short).tokens) == 7
    assert paced_tokens([1, 2, 3], Stop(0), facts=short).finish == Finish.LIMIT


def test_logprobs_come_where_asked_and_are_the_same_again() -> None:
    def outputs(company: int) -> tuple[float, list[int], list[float]]:
        rows = [Row([9, 8, 7], [30 + n], Sampling(logprobs=-1)) for n in range(company)]
        rows.append(Row([1, 2, 3], [1], Sampling(logprobs=3)))
        columns = step(a_runner(), rows, [3] * len(rows)).logprobs
        assert columns is not None and columns.token_index.tolist() == [company]
        assert columns.top_count.tolist() == [3] and columns.rank.tolist() == [1]
        assert columns.top_id[0] == rows[-1].tokens[-1] and (np.diff(columns.top_logprob) < 0).all()
        return float(columns.logprob[0]), columns.top_id.tolist(), columns.top_logprob.tolist()

    assert outputs(0) == outputs(3)
    assert step(a_runner(), [Row([1], [1])], [1]).logprobs is None
