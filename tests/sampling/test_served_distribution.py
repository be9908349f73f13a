"""What the five processes draw is distributed as it was asked: Pearson's chi-square against float64, seeds fixed.

Each case has 20,000 samples of one token; a token that may not come must never come. Slow: `make sampling`.
"""

from __future__ import annotations

import numpy as np
import pytest

from quire.local.stack import LocalStack
from tests.sampling.drawing import draw
from tests.sampling.reference import Asked, ReferenceModel, distribution, p_value

SAMPLES = 20_000
LEAST_P = 1e-3
PROMPT = [87, 312, 45, 2048, 9, 512, 77, 1031]
OUTPUT = [300, 300, 300, 41, 41, 99]

CASES = {
    "temperature 1": (Asked(), []),
    "temperature 0.3": (Asked(temperature=0.3), []),
    "temperature 2.5": (Asked(temperature=2.5), []),
    "top_k": (Asked(top_k=7), []),
    "top_p": (Asked(top_p=0.6), []),
    "min_p": (Asked(min_p=0.05), []),
    "typical_p": (Asked(typical_p=0.6), []),
    "all filters": (Asked(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02), []),
    "bias": (Asked(logit_bias={11: 4.0, 300: 6.5, 87: -3.0}, top_p=0.9), []),
    "allowed": (Asked(temperature=1.5, allowed_token_ids=[3, 41, 99, 300, 700, 4000]), []),
    "repetition penalty": (Asked(repetition_penalty=1.7, temperature=1.2), []),
    "presence penalty": (Asked(presence_penalty=1.5, logit_bias={300: 5.0, 41: 5.0, 7: 5.0}), OUTPUT),
    "frequency penalty": (Asked(frequency_penalty=0.8, logit_bias={300: 6.0, 41: 5.0, 7: 5.0}), OUTPUT),
    "all penalties": (
        Asked(presence_penalty=-1.0, frequency_penalty=0.5, repetition_penalty=1.3, temperature=0.9, top_p=0.95),
        OUTPUT,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_tokens_come_as_often_as_they_should(name: str, stack: LocalStack, reference: ReferenceModel) -> None:
    asked, output = CASES[name]
    logits = reference.logits([*PROMPT, *output])[-1]
    expected = distribution(logits, asked, PROMPT, output)
    counts = await draw(stack.grpc, asked, PROMPT, output, SAMPLES, len(expected), seed=1234)
    assert counts.sum() == SAMPLES
    # What lies on a filter's edge may fall on either side in float32: no token of weight does.
    assert counts[expected == 0].sum() <= SAMPLES * 1e-4, np.flatnonzero((expected == 0) & (counts > 0))
    assert p_value(counts, expected) > LEAST_P


@pytest.mark.slow
async def test_the_test_sees_a_wrong_distribution(stack: LocalStack, reference: ReferenceModel) -> None:
    """A temperature that is two percent off is found out."""
    logits = reference.logits(PROMPT)[-1]
    counts = await draw(stack.grpc, Asked(temperature=1.0), PROMPT, [], SAMPLES, len(logits), seed=1234)
    assert p_value(counts, distribution(logits, Asked(temperature=1.05), PROMPT, [])) < LEAST_P


def test_the_references_own_arithmetic() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    assert distribution(logits, Asked(top_k=2), [], []) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, Asked(top_p=0.6), [], []) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, Asked(min_p=0.3), [], []) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, Asked(temperature=0.5), [], []) == pytest.approx(np.array([16, 4, 1, 1]) / 22)
    biased = distribution(logits, Asked(logit_bias={3: float(np.log(3))}), [], [])
    assert biased == pytest.approx(np.array([4, 2, 1, 3]) / 10)
    counts = np.array([5000, 2500, 1250, 1250])
    assert p_value(counts, np.exp(logits)) == pytest.approx(1.0)
    assert p_value(counts + np.array([150, -150, 0, 0]), np.exp(logits)) < 0.01
