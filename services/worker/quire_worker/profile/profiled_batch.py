"""Makes a step to profile: sequences that decode after a given number of tokens, and optionally a fresh prompt. Each
sequence has its own pages, and all have the same sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import ConfigError
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.arrays import Int32
from quire_worker.profile.cost import Attended
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import rows_of
from quire_worker.step import StepBatch

if TYPE_CHECKING:
    from quire_worker.sampling.param_rows import ParamRows

_GREEDY = Sampling()


def profiled_batch(
    decodes: int,
    context: int,
    prompt: int,
    vocab_size: int,
    page_size: int,
    num_pages: int,
    sampling: Sampling = _GREEDY,
) -> StepBatch:
    """Make a batch of `decodes` sequences at `context` tokens, the computed one included, and, unless `prompt` is 0, a
    fresh prompt. Every sequence samples. Token ids and pages are random, but the same each time. Raises ConfigError for
    too few pages, or nothing to do."""
    position: Int32 = np.array([context - 1] * decodes + [0] * bool(prompt), np.int32)
    count: Int32 = np.array([1] * decodes + [prompt] * bool(prompt), np.int32)
    if not len(count):
        raise ConfigError("NOTHING_TO_PROFILE", "Neither --batch nor --prompt asks for a row.", "Give one of them.")
    need = -(-(position + count) // page_size)
    if need.sum() > num_pages - 1:
        raise ConfigError(
            "KV_CACHE_TOO_SMALL",
            f"{decodes} sequences of {context} tokens and a prompt of {prompt} need {int(need.sum())} KV pages; there "
            f"are {num_pages - 1}.",
            "Raise --kv-cache-memory-bytes, or ask for less.",
            param="kv_cache_memory_bytes",
        )
    rng = np.random.default_rng(0)
    pages = rng.permutation(np.arange(1, num_pages, dtype=np.int32))
    table: Int32 = np.zeros((len(count), int(need.max())), np.int32)
    at = 0
    for row, pages_needed in enumerate(need.tolist()):
        table[row, :pages_needed] = pages[at : at + pages_needed]
        at += pages_needed
    rows = len(count)
    return StepBatch(
        token=rng.integers(0, vocab_size, int(count.sum())),
        count=count,
        position=position,
        page_table=table,
        sample=np.ones(rows, np.bool_),
        params=_params(rows, sampling),
        logprobs=np.full(rows, sampling.logprobs, np.int32),
        slot=np.arange(rows, dtype=np.int32),
        fed=np.arange(rows) < decodes,
        last=np.zeros(rows, np.bool_),
        stop_id=np.full((rows, 1), -1, np.int32),
        controls=_controls(rows, prompt or context, vocab_size, sampling),
    )


def _params(rows: int, sampling: Sampling) -> ParamRows:
    """Return the param rows of sequences with these sampling parameters, and a seed for each."""
    params = rows_of([sampling] * rows)
    params["seed"] = np.arange(rows)
    return params


def _controls(rows: int, tokens: int, vocab_size: int, sampling: Sampling) -> dict[int, LogitsState]:
    """Return, by row, a logits processor state with a random prompt; empty if the sampling parameters need no
    controls."""
    if sampling.controls is None:
        return {}
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab_size, tokens).astype(np.int32) for _ in range(rows)]
    return {row: LogitsState(Sequence(prompt, Stop(tokens), sampling)) for row, prompt in enumerate(prompts)}


def attended(batch: StepBatch) -> tuple[Attended, Attended]:
    """Return two sums over a batch: the rows, keys and pairs of its decoding sequences, and those of its prefilling
    sequences. Windows and chunks do not reduce them."""
    found = [Attended(0, 0, 0), Attended(0, 0, 0)]
    for position, count, fed in zip(batch.position.tolist(), batch.count.tolist(), batch.fed.tolist(), strict=True):
        more, before = Attended.of(position, count), found[not fed]
        found[not fed] = Attended(before.rows + more.rows, before.keys + more.keys, before.pairs + more.pairs)
    return found[0], found[1]
