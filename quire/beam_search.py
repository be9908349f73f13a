"""Beam search by requests for one token each, as in vLLM. Each step asks for the likeliest tokens after every beam.

The common beginnings of beams are cached pages, so a step computes little. This module knows nothing of channels: it
gets a function that sends requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from quire.outputs import Logprob, RequestOutput
from quire.prompts import Prompt, cache_salt_of, salted
from quire.sampling_params import BeamSearchParams, SamplingParams

Ask = Callable[[Sequence[Prompt], SamplingParams], Awaitable[list[RequestOutput]]]


@dataclass
class BeamSearchSequence:
    """`tokens` are the tokens of prompt and answer, as in vLLM; `text` is only the answer's."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    raw: bytes = b""
    """The answer's text so far; may end within a character."""


@dataclass
class BeamSearchOutput:
    """The best sequences, the best one first."""

    sequences: list[BeamSearchSequence]


async def search(prompt: Prompt, params: BeamSearchParams, eos: Collection[int], ask: Ask) -> BeamSearchOutput:
    """Search the likeliest continuations of one prompt. Each step sends a request for one token per beam by `ask`, with
    the prompt's cache salt. It extends every beam by each of its 2 x `beam_width` likeliest next tokens (and by the
    sampled one, if that is another), and keeps the `beam_width` longer beams with the highest logprob. A beam that ends
    with an id in `eos` is set aside as finished, unless the parameters ignore it. The search ends after `max_tokens`
    steps, or when no open beam is left. The open beams then get the finish reason `length`. Returns the best
    `beam_width` of all beams by vLLM's score, with their text."""
    step = SamplingParams(
        max_tokens=1, temperature=params.temperature, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
    )
    done: list[BeamSearchSequence] = []
    salt = cache_salt_of(prompt)
    (first,) = await ask([prompt], step)
    prompt_length = len(first.prompt_token_ids)
    beams = [BeamSearchSequence(list(first.prompt_token_ids))]
    outputs = [first]
    for length in range(1, params.max_tokens + 1):
        grown: list[BeamSearchSequence] = []
        for beam, output in zip(beams, outputs, strict=True):
            for candidate in _extensions(beam, output):
                if candidate.tokens[-1] in eos and not params.ignore_eos:
                    _end(candidate, params)
                    done.append(candidate)
                else:
                    grown.append(candidate)
        # Within a step all have one length, so that the penalty does not change their order.
        beams = sorted(grown, key=lambda beam: beam.cum_logprob, reverse=True)[: params.beam_width]
        if not beams or length == params.max_tokens:
            break
        outputs = await ask([salted(beam.tokens, salt) for beam in beams], step)
    for beam in beams:
        beam.finish_reason = "length"
    everything = [*done, *beams]
    everything.sort(key=lambda beam: _score(beam, prompt_length, params, eos), reverse=True)
    best = everything[: params.beam_width]
    for beam in best:
        beam.text = beam.raw.decode("utf-8", "replace")
    return BeamSearchOutput(best)


def _extensions(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    """Return copies of the beam, one for each candidate token of the output, longer by this token. The token's logprob
    is added to the beam's sum, and its bytes to the beam's text."""
    (candidates,) = output.outputs[0].logprobs or [{}]
    return [
        BeamSearchSequence(
            [*beam.tokens, token],
            [*beam.logprobs, candidates],
            beam.cum_logprob + logprob.logprob,
            raw=beam.raw + logprob.token_bytes,
        )
        for token, logprob in candidates.items()
    ]


def _end(beam: BeamSearchSequence, params: BeamSearchParams) -> None:
    """Mark a beam as stopped by its last token, and cut this token's bytes off the text unless the parameters keep
    them."""
    beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
    if not params.include_stop_str_in_output:
        beam.raw = beam.raw[: len(beam.raw) - len(beam.logprobs[-1][beam.tokens[-1]].token_bytes)]


def _score(beam: BeamSearchSequence, prompt_length: int, params: BeamSearchParams, eos: Collection[int]) -> float:
    """Return vLLM's score: the sum of logprobs divided by the length to the power of the penalty. The length counts the
    tokens of prompt and answer, but not an end-of-sequence token at the end."""
    length = len(beam.tokens)
    if beam.tokens[-1] in eos and length > prompt_length:
        length -= 1
    return float(beam.cum_logprob / max(length, 1) ** params.length_penalty)
