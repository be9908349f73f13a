"""Checks whether this engine can hold the sequence of a Start. Each failure is a typed error of that slot only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import InvalidArgument, QuireError, TooLarge, Unsupported
from quire_common.logit_controls import check_vocabulary
from quire_common.logits_processors import check_known
from quire_common.sequence import check_sampling
from quire_common.thinking import check_thinking

if TYPE_CHECKING:
    from quire_common.credit import Start
    from quire_worker.arrays import Int32
    from quire_worker.engine.spec import EngineSpec


def check_start(start: Start, spec: EngineSpec) -> None:
    """Raise a QuireError if this engine cannot run the Start. Checked are context length, prompt, room for one more
    token (unless max_tokens is 0), tokens left to generate, token ids, number of stop ids, logprobs, sampling, logit
    controls, processors, thinking budget and page table."""
    sequence, stop = start.sequence, start.sequence.stop
    known = sequence.known_len
    if not 1 <= start.max_model_len <= spec.max_model_len:
        raise InvalidArgument(
            "BAD_CONTEXT_LENGTH",
            f"max_model_len is {start.max_model_len}, this worker's is {spec.max_model_len}.",
            "Start with a max_model_len of at least 1 and at most the worker's.",
        )
    if len(sequence.prompt_ids) == 0:
        raise InvalidArgument("EMPTY_PROMPT", "The prompt holds no token.", "Send at least one token.", param="prompt")
    room = start.max_model_len if stop.max_tokens == 0 else start.max_model_len - 1
    if known > room:
        raise TooLarge(
            "PROMPT_TOO_LONG",
            f"The sequence has {known} tokens, the context {start.max_model_len}: nothing can follow.",
            "Shorten the prompt.",
            param="prompt",
        )
    if len(sequence.output_ids) and len(sequence.output_ids) >= stop.max_tokens:
        raise InvalidArgument(
            "NOTHING_TO_GENERATE",
            f"{len(sequence.output_ids)} tokens were emitted already, max_tokens is {stop.max_tokens}.",
            "Finish the request by length instead of starting it.",
            param="max_tokens",
        )
    for ids in (sequence.prompt_ids, sequence.output_ids):
        _check_token_ids(ids, spec.vocab_size)
    if len(stop.stop_token_ids) > spec.max_stop_ids:
        raise TooLarge(
            "TOO_MANY_STOP_IDS",
            f"{len(stop.stop_token_ids)} stop token ids, at most {spec.max_stop_ids} are possible.",
            "Send fewer.",
            param="stop_token_ids",
        )
    check_sampling(sequence.sampling)
    if sequence.sampling.logprobs > spec.vocab_size:
        raise InvalidArgument(
            "TOO_MANY_LOGPROBS",
            f"{sequence.sampling.logprobs} alternatives, the vocabulary has {spec.vocab_size} tokens.",
            "Ask for fewer.",
            param="logprobs",
        )
    if sequence.sampling.controls is not None:
        check_vocabulary(sequence.sampling.controls, spec.vocab_size)
    check_known(sequence.sampling.processors, spec.logits_processors)
    if sequence.thinking is not None:
        check_thinking(sequence.thinking, spec.vocab_size)
    _check_tables(start, spec)


def stop_ids_of(start: Start, spec: EngineSpec) -> tuple[int, ...]:
    """Return the ids that end the sequence: its own stop ids and, unless it ignores them, the model's end-of-sequence
    ids. Ids outside the vocabulary are left out: they are never sampled, and a sampler cannot block them."""
    stop = start.sequence.stop
    ids = stop.stop_token_ids if stop.ignore_eos else (*spec.eos_token_ids, *stop.stop_token_ids)
    return tuple(token for token in ids if 0 <= token < spec.vocab_size)


def grantable(pages: Int32, spec: EngineSpec) -> bool:
    """Whether all pages lie in the pool and none is page 0, the dummy page, which is never granted."""
    return not len(pages) or (int(pages.min()) >= 1 and int(pages.max()) < spec.num_pages)


def bad_pages(pages: Int32) -> QuireError:
    """Return the error BAD_PAGE for pages of which some are not in the pool, or are named twice. It shows the first
    eight of `pages`, whether these are bad or not."""
    shown = pages[:8].tolist()
    return InvalidArgument(
        "BAD_PAGE",
        f"The page table names pages that cannot be granted, among {shown}.",
        "Grant each page once, from 1 up to the number of pages that the worker declared.",
    )


def table_full(spec: EngineSpec) -> QuireError:
    """Return the error TOO_MANY_PAGES for more pages than the longest sequence has."""
    return TooLarge(
        "TOO_MANY_PAGES",
        f"A page table holds at most {spec.table_width} pages here.",
        "Grant no more pages than max_model_len needs.",
    )


def _check_token_ids(ids: Int32, vocab_size: int) -> None:
    """Raise InvalidArgument TOKEN_OUT_OF_RANGE if an id is negative or outside the vocabulary."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InvalidArgument(
            "TOKEN_OUT_OF_RANGE",
            f"A token id is outside 0..{vocab_size - 1}.",
            "Encode with the tokenizer of the model that the worker serves.",
            param="prompt",
        )


def _check_tables(start: Start, spec: EngineSpec) -> None:
    """Raise a QuireError unless the Start has exactly one page table, no longer than the longest sequence needs, which
    holds the cached range. It must name each page once, none of them page 0 or outside the pool."""
    if len(start.pages) != 1:
        raise Unsupported(
            "KV_GROUPS_UNSUPPORTED",
            f"The start has page tables of {len(start.pages)} KV groups, this model has one.",
            "Send one table per KV group that the worker's hello names.",
        )
    table = start.pages[0]
    if len(table) > spec.table_width:
        raise table_full(spec)
    if not grantable(table, spec) or len(np.unique(table)) != len(table):
        raise bad_pages(table)
    if start.cached_len > len(table) * spec.page_size:
        raise InvalidArgument(
            "CACHED_PAST_PAGES",
            f"cached_len is {start.cached_len}, the pages hold {len(table) * spec.page_size} positions.",
            "Grant the pages that hold the cached range.",
        )
