"""Beam search against an exhaustive search over a small made-up language."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence

import pytest

from quire import BeamSearchParams, CompletionOutput, InvalidArgument, Logprob, RequestOutput, SamplingParams
from quire.beam_search import search
from quire.prompts import Prompt, cache_salt_of, normalise

VOCABULARY, EOS, PROMPT = 4, 3, [0, 1]


def distribution(tokens: Sequence[int]) -> list[float]:
    """Log probabilities after these tokens."""
    numbers = random.Random(repr(list(tokens)))
    weights = [numbers.random() + 0.05 for _ in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


async def ask(prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
    outputs = []
    for prompt in prompts:
        assert isinstance(prompt, list) and params.max_tokens == 1
        logprobs = distribution(prompt)
        best = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])[: params.logprobs]
        found = {token: Logprob(logprobs[token], token_bytes=b"abc."[token : token + 1]) for token in best}
        outputs.append(RequestOutput(prompt_token_ids=prompt, outputs=[CompletionOutput(0, logprobs=[found])]))
    return outputs


def everything(length: int) -> dict[tuple[int, ...], float]:
    """Every answer that ends with EOS or is `length` long."""
    answers = {}
    for size in range(1, length + 1):
        for answer in itertools.product(range(VOCABULARY), repeat=size):
            ended = answer[-1] == EOS
            if EOS in answer[:-1] or (size < length and not ended):
                continue
            answers[answer] = sum(distribution([*PROMPT, *answer[:place]])[token] for place, token in enumerate(answer))
    return answers


def test_every_step_is_asked_for_under_the_prompts_salt() -> None:
    salts = list[str]()

    async def note(prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
        salts.extend(map(cache_salt_of, prompts))
        return await ask([list(normalise(prompt)) for prompt in prompts], params)  # type: ignore[arg-type]  # token ids

    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    asyncio.run(search({"prompt_token_ids": PROMPT, "cache_salt": "mine"}, params, {EOS}, note))
    assert salts == ["mine"] * 5, "one, then two beams twice"


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
def test_a_wide_beam_finds_the_best(penalty: float) -> None:
    params = BeamSearchParams(beam_width=64, max_tokens=3, length_penalty=penalty)
    found = asyncio.run(search(PROMPT, params, {EOS}, ask)).sequences

    def score(answer: tuple[int, ...], logprob: float) -> float:
        return float(logprob / (len(PROMPT) + len(answer) - (answer[-1] == EOS)) ** penalty)

    answers = everything(3)
    ordered = sorted(answers, key=lambda answer: score(answer, answers[answer]), reverse=True)
    assert [tuple(beam.tokens[2:]) for beam in found] == ordered[:64]
    for beam in found:
        answer = tuple(beam.tokens[2:])
        assert beam.cum_logprob == pytest.approx(answers[answer]) and len(beam.logprobs) == len(answer)
        assert beam.text == "".join("abc"[token] for token in answer if token != EOS)
        assert (beam.finish_reason, beam.stop_reason) == (("stop", EOS) if answer[-1] == EOS else ("length", None))


def test_a_beam_of_one_is_greedy() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True, include_stop_str_in_output=True)
    (beam,) = asyncio.run(search(PROMPT, params, {EOS}, ask)).sequences
    tokens = list(PROMPT)
    for _ in range(6):
        logprobs = distribution(tokens)
        tokens.append(logprobs.index(max(logprobs)))
    assert beam.tokens == tokens and beam.finish_reason == "length"


def test_params_are_checked() -> None:
    for width, length in ((0, 1), (1, 0)):
        with pytest.raises(InvalidArgument):
            BeamSearchParams(beam_width=width, max_tokens=length)
