"""Penalties, biases, allowed and bad tokens: against a plain reading of vLLM's definition, and by what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.sampler import sample
from quire_worker.step import NOTHING_LEFT
from tests.model.sampling.sampling_columns import columns

VOCAB = 24
DRAWS = 20_000
PROMPT, OUTPUT = [1, 2, 2, 3, 9], [3, 4, 4, 5, 4]
# The least probability of a difference as large as the one seen, were the distribution right.
LEAST_P = 1e-3


def state_of(controls: LogitControls, prompt: list[int], output: list[int], fed: int = 0) -> LogitsState:
    """The last `fed` tokens of the output are told as they are drawn."""
    start = len(output) - fed
    ids = (np.array(prompt, np.int32), np.array(output[:start], np.int32))
    row = LogitsState(Sequence(ids[0], Stop(100), Sampling(controls=controls), ids[1]))
    for index, token in enumerate(output[start:]):
        if index % 2:
            row.apply(np.zeros(VOCAB, np.float32))  # drawing between must leave no trace
        row.fed(token)
    return row


def by_definition(
    logits: np.ndarray, controls: LogitControls, prompt: list[int], output: list[int], blocked: tuple[int, ...] = ()
) -> np.ndarray:
    """Token by token, in float64."""
    changed = np.empty(len(logits))
    bias = dict(controls.logit_bias)
    for token, raw in enumerate(logits.tolist()):
        x = raw
        if controls.allowed_token_ids and token not in controls.allowed_token_ids:
            x = -np.inf
        for word in controls.bad_words:
            if word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
                x = -np.inf
        if token in blocked:
            x = -np.inf
        x += bias.get(token, 0.0)
        if token in prompt or token in output:
            x = x / controls.repetition_penalty if x > 0 else x * controls.repetition_penalty
        x -= controls.frequency_penalty * output.count(token)
        x -= controls.presence_penalty * (token in output)
        changed[token] = x
    return changed


tokens = st.integers(0, VOCAB - 1)
some_controls = st.builds(
    LogitControls,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 7.0]), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    allowed_token_ids=st.lists(tokens, max_size=6, unique=True).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(
    some_controls,
    st.lists(tokens, min_size=1, max_size=8),
    st.lists(tokens, max_size=8),
    st.integers(0, 8),
    st.lists(tokens, max_size=2).map(tuple),
    st.integers(0, 99),
)
def test_it_is_vllms_definition_however_the_output_came_to_be_known(
    controls: LogitControls, prompt: list[int], output: list[int], fed: int, blocked: tuple[int, ...], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    found = logits.copy()
    state_of(controls, prompt, output, min(fed, len(output))).apply(found, np.array(blocked, np.int32))
    np.testing.assert_allclose(found, by_definition(logits, controls, prompt, output, blocked), rtol=1e-5, atol=1e-5)


def test_a_bad_word_needs_all_that_comes_before_its_end() -> None:
    word = LogitControls(bad_words=((4, 5, 6), (7,)))
    for output, forbidden in (([4, 5], [6, 7]), ([5], [7]), ([4, 5, 5], [7]), ([1, 4, 5], [6, 7]), ([], [7])):
        logits = np.zeros(VOCAB, np.float32)
        state_of(word, [4, 5], output).apply(logits)
        assert np.flatnonzero(np.isinf(logits)).tolist() == forbidden


def test_a_request_that_forbids_everything_fails_alone() -> None:
    nothing = state_of(LogitControls(allowed_token_ids=(3,), bad_words=((3,),)), PROMPT, [])
    logits = torch.zeros(3, VOCAB)
    logits[:, 9] = 40.0
    before = logits.clone()
    assert sample(logits, columns(3, controls={1: nothing})).tolist() == [9, NOTHING_LEFT, 9]
    assert torch.equal(logits, before)


def filtered(changed: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """vLLM's order: temperature, min_p, top_k, top_p; in float64, with a full sort."""
    z = changed / temperature
    weight = np.exp(z - z.max())
    weight[weight < min_p] = 0.0
    if top_k:
        weight[z < np.sort(z)[-top_k]] = 0.0
    larger = np.array([weight[z > each].sum() for each in z])
    weight[larger >= top_p * weight.sum()] = 0.0
    return np.asarray(weight / weight.sum())


CASES: dict[str, tuple[dict[str, Any], LogitControls]] = {
    "temperature": ({"temperature": 0.7}, LogitControls()),
    "top_k": ({"top_k": 5}, LogitControls()),
    "top_p": ({"top_p": 0.8}, LogitControls()),
    "min_p": ({"min_p": 0.1}, LogitControls()),
    "presence": ({}, LogitControls(presence_penalty=1.25)),
    "frequency": ({}, LogitControls(frequency_penalty=0.75)),
    "repetition": ({}, LogitControls(repetition_penalty=1.6)),
    "bias": ({}, LogitControls(logit_bias=((0, 1.5), (4, -2.0), (11, -100.0)))),
    "allowed": ({}, LogitControls(allowed_token_ids=(1, 3, 4, 9, 17))),
    "bad words": ({}, LogitControls(bad_words=((5, 4, 6), (4, 7), (8,)))),
    "all": (
        {"temperature": 1.3, "top_k": 14, "top_p": 0.9, "min_p": 0.02},
        LogitControls(0.5, -0.25, 1.2, ((3, 2.0),), tuple(range(22)), ((4, 2),)),
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.deep) if n == "all" else n for n in CASES])
def test_the_distribution_is_that_of_a_float64_reference(name: str) -> None:
    filters, controls = CASES[name]
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5
    wanted = filtered(by_definition(logits.numpy(), controls, PROMPT, OUTPUT), **full)
    row = state_of(controls, PROMPT, OUTPUT, fed=2)
    seed, position = np.arange(DRAWS) // 2, np.arange(DRAWS) % 2 * 1000 + 7
    asked = columns(DRAWS, **full, seed=seed, position=position, controls=dict.fromkeys(range(DRAWS), row))
    counts = np.bincount(sample(logits.expand(DRAWS, -1), asked), minlength=VOCAB)
    support = wanted > 0
    assert counts[~support].sum() == 0
    expected = wanted[support] * DRAWS
    statistic = float(((counts[support] - expected) ** 2 / expected).sum())
    degrees = int(support.sum()) - 1
    probability = torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0))
    assert float(probability) > LEAST_P
