"""Bounds on products of a request's fields. Each field may be as large as its own bound, but not all fields at once.

If every sequence of a request repeats a field, the field counts once per sequence. `check_request` needs only the
request, and runs before any work. `check_encoded` needs the lengths of the prompts, and `check_compiled` the compiled
grammar; both run before a request goes to an engine. This module knows no protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument
from quire_common.logit_controls import NEUTRAL, control_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.sequences.job import GenerateJob

# Every open at a tokenizer repeats the stop strings and stop token ids.
MAX_STOP_BYTES = 1 << 20
# Every Submit to a scheduler repeats biases, allowed tokens and bad words. The bound allows the longest list with
# n = 128.
MAX_CONTROL_VALUES = 2 << 20
# Every Submit repeats its prompt. The bound allows n = 128 with a prompt of 131,072 tokens.
MAX_PROMPT_TOKENS = 16 << 20
# If the client wants its prompt back, an answer repeats the prompt for each of its choices.
MAX_TOLD_PROMPT_TOKENS = 2 << 20
# A token's own logprob counts as one alternative. All alternatives of a prompt come at once. The bound allows 131,072
# tokens with 7 other alternatives each.
MAX_PROMPT_ALTERNATIVES = 1 << 20
# The alternatives of an answer come with its tokens, and are kept until the answer has ended. The bound allows n = 128
# with 4,096 tokens and one other alternative each.
MAX_ALTERNATIVES = 1 << 20
# Each step of a beam search sends the prompt and the answer so far, once per beam. The bound allows n = 8 with 131,072
# tokens.
MAX_BEAM_TOKENS = 1 << 20
# Every Submit repeats the compiled grammar. The bound allows n = 32 with the largest grammar, or n = 128 with 128 KiB.
MAX_GRAMMARS_BYTES = 16 << 20
# An answer without max_tokens counts as this many tokens at most, because few answers fill a long context.
UNSAID_ANSWER_TOKENS = 32_768
_ID_BYTES = 4


def check_request(job: GenerateJob) -> None:
    """Raise InvalidArgument for stop strings and stop ids that have too many bytes, times the number of sequences."""
    stop = sum(len(text.encode(errors="surrogatepass")) for text in job.text.stop) + _ID_BYTES * len(job.stop_token_ids)
    _check_product("Bytes of stop strings and stop token ids", stop, job.weight, MAX_STOP_BYTES, "stop")


def check_encoded(job: GenerateJob, prompts: Sequence[int], answers: Sequence[int]) -> None:
    """Raise InvalidArgument if the request is too large as a whole, now that the tokens of each prompt and of its
    longest answer are known. Bounds, each times the sequences or answers that repeat the field: prompt tokens,
    beam-search tokens, logit controls (with the bad words as tokens), prompts that the answer repeats, and the logprob
    alternatives of prompts and answers. If neither the job nor the server limits the answers, each counts as 32,768
    tokens at most for its alternatives."""
    prompt_tokens, sampling = sum(prompts), job.sampling
    _check_product("Tokens of the prompts", prompt_tokens, job.siblings, MAX_PROMPT_TOKENS, "prompt")
    if job.beams:
        tokens = prompt_tokens + sum(answers)
        _check_product("Tokens of the prompts and answers of a beam search", tokens, job.n, MAX_BEAM_TOKENS, "n")
    values = control_values(sampling.controls or NEUTRAL)
    _check_product("Values of logit_bias, allowed_token_ids and bad_words", values, job.weight, MAX_CONTROL_VALUES, "n")
    if job.wants.echo or job.wants.token_ids:
        _check_product(
            "Tokens of the prompts, which the answer repeats,", prompt_tokens, job.n, MAX_TOLD_PROMPT_TOKENS, "n"
        )
    if sampling.prompt_logprobs >= 0:
        alternatives = (1 + sampling.prompt_logprobs) * prompt_tokens
        _check_product(
            "Alternatives of all prompt tokens", alternatives, job.n, MAX_PROMPT_ALTERNATIVES, "prompt_logprobs"
        )
    if sampling.logprobs >= 0:
        said = job.max_tokens is not None or job.default_max_tokens is not None
        tokens = sum(answers) if said else sum(min(answer, UNSAID_ANSWER_TOKENS) for answer in answers)
        alternatives = (1 + sampling.logprobs) * tokens
        _check_product("Alternatives of all answer tokens", alternatives, job.siblings, MAX_ALTERNATIVES, "logprobs")


def check_compiled(job: GenerateJob) -> None:
    """Raise InvalidArgument for a compiled grammar that has too many bytes, times the number of sequences."""
    if job.constraint is not None:
        size = len(job.constraint.text.encode())
        _check_product("Bytes of the compiled grammar", size, job.weight, MAX_GRAMMARS_BYTES, "n")


def _check_product(what: str, each: int, times: int, most: int, param: str) -> None:
    """Raise InvalidArgument, naming `param`, if `each` x `times` exceeds `most`. `what` describes the product."""
    if each * times > most:
        raise InvalidArgument(
            "PRODUCT_TOO_LARGE",
            f"{what} are {each}, {times} times over: together {each * times}, and at most {most} are accepted.",
            "Send fewer or shorter ones, lower n, best_of or max_tokens, or split the request.",
            param=param,
        )
