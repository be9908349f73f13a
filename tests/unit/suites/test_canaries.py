"""Canaries tell an answer that is another request's, or no request's, from their own."""

from __future__ import annotations

import pytest

from tests.chaos.canaries import Canaries


@pytest.fixture
def canaries() -> Canaries:
    return Canaries("127.0.0.1:1", 1, seed=7)


def test_canaries_have_prompts_and_answers_of_their_own(canaries: Canaries) -> None:
    made = [canaries.make() for _ in range(300)]
    assert len({canary.prompt for canary in made}) == len(made)
    assert len({canary.answer[:8] for canary in made}) == len(made)


def test_own_answers_are_no_crossing(canaries: Canaries) -> None:
    for canary in [canaries.make() for _ in range(20)]:
        canaries.judge(canary, list(canary.prompt), list(canary.answer))
    assert (canaries.answered, canaries.crossed) == (20, [])


def test_answer_of_another_canary_is_told_with_its_owner(canaries: Canaries) -> None:
    one, other = canaries.make(), canaries.make()
    canaries.judge(one, list(one.prompt), list(other.answer))
    assert f"the answer of [{other.number}]" in canaries.crossed[0]


def test_one_wrong_token_or_another_prompt_is_a_crossing(canaries: Canaries) -> None:
    one, other = canaries.make(), canaries.make()
    canaries.judge(one, list(one.prompt), [one.answer[0] ^ 1, *one.answer[1:]])
    canaries.judge(one, list(other.prompt), list(one.answer))
    assert len(canaries.crossed) == 2
