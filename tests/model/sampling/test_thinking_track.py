"""The thinking budget: against a plain reading of its definition, however the output came to be known, and as drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.sampler import sample
from quire_worker.sampling.thinking_track import ThinkingTrack
from quire_worker.step import DAMAGED
from tests.fakes.worker.token_masks import mask_of
from tests.model.sampling.sampling_columns import columns

VOCAB = 12
# Few tokens, so that marks overlap themselves and each other.
tokens = st.integers(0, 2)
marks = st.lists(tokens, min_size=1, max_size=4).map(tuple)
some_ids = st.lists(tokens, max_size=12)


def by_definition(budget: ThinkingBudget, prompt: list[int], output: list[int]) -> int | None:
    """The forced token, by looking at everything anew."""
    start, end = list(budget.start_ids), list(budget.end_ids)
    known, begun = prompt + output, 0
    for place in range(len(prompt) - len(start) + 1):
        if prompt[place : place + len(start)] == start:
            begun = place + len(start)
    thinking, since = begun > 0, begun if begun else max(0, len(prompt) - len(start))
    for place in range(since, len(known)):
        # Of the tokens since the last mark alone.
        seen, mark = known[since : place + 1], end if thinking else start
        if seen[-len(mark) :] == mark:
            thinking, since = not thinking, place + 1
    if not thinking or len(known) - since < budget.max_tokens:
        return None
    made = max(n for n in range(len(end)) if n == 0 or known[since:][-n:] == end[:n])
    return end[made]


@pytest.mark.deep
@settings(max_examples=400, deadline=None)
@given(marks, marks, st.integers(0, 6), some_ids, some_ids, st.integers(0, 12))
def test_what_is_forced_depends_on_tokens_alone(
    start: tuple[int, ...], end: tuple[int, ...], most: int, prompt: list[int], output: list[int], fed: int
) -> None:
    budget = ThinkingBudget(start, end, most)
    known = max(0, len(output) - fed)
    track = ThinkingTrack(budget, np.array(prompt, np.int32), output[:known])
    assert track.forced() == by_definition(budget, prompt, output[:known])
    for place in range(known, len(output)):
        track.fed(output[place])
        assert track.forced() == by_definition(budget, prompt, output[: place + 1])


@settings(max_examples=100, deadline=None)
@given(marks, marks, st.integers(0, 6), st.integers(0, 99))
def test_thinking_ends_within_its_budget_and_an_end_mark(
    start: tuple[int, ...], end: tuple[int, ...], most: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    track = ThinkingTrack(ThinkingBudget(start, end, most), np.array(start, np.int32), ())
    thought = 0
    while track.spent >= 0:
        forced = track.forced()
        track.fed(int(rng.integers(0, 3)) if forced is None else forced)
        thought += 1
    assert thought <= most + len(end)


def row(budget: ThinkingBudget, prompt: list[int], controls: LogitControls | None = None) -> LogitsState:
    ids = np.array(prompt, np.int32)
    found = LogitsState.of(Sequence(ids, Stop(20), Sampling(controls=controls), thinking=budget))
    assert found is not None and found.changes_logits
    return found


def test_a_forced_token_is_drawn_whatever_else_was_asked() -> None:
    """Neither filters, nor temperature, nor biases, nor what is forbidden change it; other rows are themselves."""
    against = LogitControls(logit_bias=((7, -100.0),), allowed_token_ids=(3,), bad_words=((7,),))
    forced = row(ThinkingBudget((1,), (7, 8), 0), [4, 1], against)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[:, 7] = -30.0
    hot = columns(3, temperature=1.5, top_k=2, top_p=0.5, min_p=0.3, controls={1: forced}, blocked={1: np.array([7])})
    free = sample(logits, columns(3, temperature=1.5, top_k=2, top_p=0.5, min_p=0.3))
    assert sample(logits, hot).tolist() == [free[0], 7, free[2]]
    forced.fed(7)
    assert sample(logits, hot)[1] == 8
    forced.fed(8)
    assert sample(logits, hot)[1] == 3, "the thinking is over, and the request's own controls hold again"


def test_damage_shows_where_the_forced_token_lies() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = float("nan")
    assert sample(logits, columns(1, controls={0: row(ThinkingBudget((1,), (7,), 0), [1])})).tolist() == [DAMAGED]


def test_a_budget_forces_nothing_that_the_grammar_forbids() -> None:
    """The answer goes on within the grammar, and the end mark comes as soon as the grammar allows it."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[0, 7] = -30.0
    forced = row(ThinkingBudget((1,), (7,), 0), [4, 1])
    for allowed, drawn in (((5,), 5), ((7,), 7), ((5, 6), int(5 + logits[0, 5:7].argmax())), ((5, 6, 7), 7)):
        mask = mask_of(VOCAB, (2,), allowed)
        asked = columns(1, temperature=0.0, controls={0: forced}, masks={0: mask})
        assert sample(logits, asked).tolist() == [drawn]
