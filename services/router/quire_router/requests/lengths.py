"""Checks and computes the lengths of prompts and answers for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.columns import i32
from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_router.sequences.job import GenerateJob, Resume

PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
# The most characters that one token can have. A client that claims more text than this sends a wrong `resume`.
_MOST_CHARACTERS = 1024
# Without `max_tokens`, truncation reserves at most 1/4 of the context for the answer.
_ANSWER_DIVISOR = 4


def check_prompt(ids: NDArray[np.int32], vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidArgument for a prompt that is empty, leaves no room for an answer, or has ids outside the
    vocabulary."""
    if len(ids) == 0:
        raise InvalidArgument("EMPTY_PROMPT", "The prompt has no tokens.", "Send at least one token.", param="prompt")
    check_prompt_length(len(ids), max_model_len)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidArgument(
            "TOKEN_OUT_OF_RANGE",
            f"Token id {wrong} is not in the vocabulary of {vocab_size}.",
            f"Send ids from 0 to {vocab_size - 1}.",
            param="prompt",
        )


def check_prompt_length(tokens: int, max_model_len: int) -> None:
    """Raise InvalidArgument (PROMPT_TOO_LONG) if the prompt's tokens leave no room for one token of an answer within
    `max_model_len`."""
    if tokens >= max_model_len:
        raise InvalidArgument(
            PROMPT_TOO_LONG,
            f"This model's maximum context length is {max_model_len} tokens, the prompt has {tokens} "
            "and at least one must be left for the answer.",
            f"Shorten the prompt to {max_model_len - 1} tokens or fewer.",
            param="prompt",
        )


def with_context_length(error: InvalidArgument, max_model_len: int) -> InvalidArgument:
    """Return a tokenizer's error PROMPT_TOO_LONG with the context's length in the words of `check_prompt_length`, by
    which clients recognise the error. The tokenizer does not know this length."""
    return InvalidArgument(
        PROMPT_TOO_LONG,
        f"This model's maximum context length is {max_model_len} tokens. {error.message}",
        f"Shorten the prompt to {max_model_len - 1} tokens or fewer.",
        param=error.param,
    )


def check_resume(resume: Resume, max_tokens: int, vocab_size: int) -> None:
    """Raise InvalidArgument for a resumed answer that has at least `max_tokens` tokens already, has more than 1024
    characters per token on average, or has ids outside the vocabulary or bytes that are no int32 ids."""
    ids = i32(resume.output_ids, "resume.output_ids")
    if resume.characters > len(ids) * _MOST_CHARACTERS:
        raise InvalidArgument(
            "BAD_RESUME",
            f"resume has {resume.characters} characters for {len(ids)} tokens, more than {_MOST_CHARACTERS} per token.",
            "Send as `characters` the number of characters that came, and as `output_ids` all tokens that came.",
            param="resume",
        )
    if len(ids) >= max_tokens:
        raise InvalidArgument(
            "BAD_RESUME",
            f"resume has {len(ids)} tokens, and max_tokens is {max_tokens}: no token is left to generate.",
            "Resume only what has not ended, with the tokens and characters that came.",
            param="resume",
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidArgument(
            "TOKEN_OUT_OF_RANGE",
            f"resume has a token id that is not in the vocabulary of {vocab_size}.",
            f"Send ids from 0 to {vocab_size - 1}.",
            param="resume",
        )


def truncated(job: GenerateJob, ids: NDArray[np.int32], max_model_len: int) -> NDArray[np.int32]:
    """Return the last `job.truncate_to` tokens of a prompt. None keeps all tokens. -1 keeps as many as leave room for
    `max_tokens` of the answer, but at least one. Without `max_tokens`, -1 keeps a prompt whole that leaves room for one
    token. A longer prompt is cut to leave room for the answer's default length (or one token), but for at most a
    quarter of the context."""
    kept = job.truncate_to
    if kept is None:
        return ids
    if kept < 0:
        if job.max_tokens is None and len(ids) < max_model_len:
            return ids
        # A default only bounds the answer, and may be longer than the context.
        answer = job.max_tokens or min(job.default_max_tokens or 1, max_model_len // _ANSWER_DIVISOR)
        kept = max(max_model_len - max(answer, 1), 1)
    return ids[len(ids) - min(kept, len(ids)) :]


def answer_length(job: GenerateJob, prompt_tokens: int, max_model_len: int) -> int:
    """Return the most tokens that one answer may have: `max_tokens` or, without it, the rest of the context, bounded by
    `default_max_tokens`. Raises InvalidArgument if max_tokens is more than the context has left after the prompt, or if
    min_tokens is more than the result."""
    room = max_model_len - prompt_tokens
    if job.max_tokens is None:
        length = room if job.default_max_tokens is None else min(room, job.default_max_tokens)
    elif job.max_tokens > room:
        raise InvalidArgument(
            "MAX_TOKENS_TOO_LARGE",
            f"This model's maximum context length is {max_model_len} tokens: the prompt has {prompt_tokens} "
            f"and max_tokens is {job.max_tokens}.",
            f"Lower max_tokens to {room} or fewer, or shorten the prompt.",
            param="max_tokens",
        )
    else:
        length = job.max_tokens
    if job.min_tokens > length:
        raise InvalidArgument(
            "MIN_TOKENS_TOO_LARGE",
            f"min_tokens is {job.min_tokens}, more than the {length} tokens that this answer may have.",
            "Lower min_tokens or raise max_tokens.",
            param="min_tokens",
        )
    return length
