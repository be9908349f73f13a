"""Logprobs that the five processes report are the model's raw ones, whatever else was asked: against float64."""

from __future__ import annotations

import numpy as np
import pytest

from quire import Client, SamplingParams
from quire.local.stack import LocalStack
from tests.sampling.reference import ReferenceModel

TOLERANCE = 1e-4
PROMPT = [87, 312, 45, 2048, 9, 512, 77, 1031, 5, 5, 640]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=24, logprobs=5, prompt_logprobs=5, ignore_eos=True),
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=50,
            max_tokens=24,
            logprobs=20,
            prompt_logprobs=0,
            seed=3,
            ignore_eos=True,
            repetition_penalty=1.3,
            logit_bias={17: 2.0},
        ),
    ],
    ids=["greedy", "everything"],
)
def test_within_a_ten_thousandth(params: SamplingParams, stack: LocalStack, reference: ReferenceModel) -> None:
    with Client(stack.grpc) as client:
        output = client.complete(PROMPT, params)
    answer = output.outputs[0]
    tokens = [*PROMPT, *answer.token_ids]
    wanted = reference.logprobs(tokens)
    assert answer.logprobs is not None and output.prompt_logprobs is not None and params.logprobs is not None
    reported = [*output.prompt_logprobs[1:], *answer.logprobs]
    assert len(reported) == len(tokens) - 1
    for position, entries in enumerate(reported):
        assert entries is not None and tokens[position + 1] in entries
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(wanted[position, token], abs=TOLERANCE), (position, token)
    for position, entries in enumerate(answer.logprobs, start=len(PROMPT) - 1):
        best = np.sort(wanted[position])[::-1]
        ranked = sorted((entry.logprob for entry in entries.values()), reverse=True)[: params.logprobs]
        assert ranked == pytest.approx(best[: params.logprobs], abs=TOLERANCE)
