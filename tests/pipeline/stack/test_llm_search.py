"""LLM over the session's stack: beam search, scores of prompts, and the bar."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, Client, SamplingParams
from quire.local.stack import LocalStack

PROMPT = "ROMEO:\nBut, soft! what "


@pytest.fixture(scope="module")
def llm(stack: LocalStack) -> Iterator[LLM]:
    with LLM(address=stack.grpc) as connected:
        yield connected


def test_beam_of_one_is_greedy_and_a_wider_one_no_worse(llm: LLM) -> None:
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=0))[0].outputs[0]
    (narrow, wide) = (
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=width, max_tokens=8))[0].sequences for width in (1, 5)
    )
    assert len(narrow) == 1 and len(wide) == 5
    assert narrow[0].tokens[-8:] == list(greedy.token_ids) and narrow[0].text == greedy.text
    assert greedy.cumulative_logprob is not None
    assert narrow[0].cum_logprob == pytest.approx(greedy.cumulative_logprob, abs=1e-3)
    assert wide[0].cum_logprob >= narrow[0].cum_logprob - 1e-6
    scores = [beam.cum_logprob / len(beam.tokens) for beam in wide]
    assert scores == sorted(scores, reverse=True) and len({tuple(beam.tokens) for beam in wide}) == 5


def test_grpc_beam_search_finds_the_same_beams(llm: LLM, client: Client) -> None:
    search = BeamSearchParams(beam_width=4, max_tokens=7)
    found = client.complete(PROMPT, search)
    (wanted,) = llm.beam_search(PROMPT, search)
    tokens = [[*found.prompt_token_ids, *output.token_ids] for output in found.outputs]
    assert tokens == [beam.tokens for beam in wanted.sequences]
    assert [output.text for output in found.outputs] == [beam.text for beam in wanted.sequences]


def test_beam_score_equals_its_prompt_logprobs(llm: LLM) -> None:
    """The sum of its logprobs is what the model gives the whole sequence when it is a prompt."""
    best = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6))[0].sequences[0]
    scored = llm.generate(best.tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(best.tokens)
    said = [(scored.prompt_logprobs[i] or {})[best.tokens[i]].logprob for i in range(-6, 0)]
    assert math.fsum(said) == pytest.approx(best.cum_logprob, abs=1e-3)


def test_max_tokens_none_and_detokenize_false_are_honoured(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, stop=["\n"], detokenize=False)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert output.finish_reason == "stop" and output.text == "" and output.token_ids


def test_callers_progress_bar_is_used(llm: LLM) -> None:
    class Bar:
        def __init__(self, **options: Any) -> None:
            bars.append(self)
            self.total, self.done, self.closed = options["total"], 0, False

        def update(self, n: int) -> None:
            self.done += n

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=2), use_tqdm=Bar)
    llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True), (1, 1, True)]
