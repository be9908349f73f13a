"""Joins outputs that wait for a slow router, so that each request has one row with the tokens of several steps. This
module does not know the wire format.

A router handles the admissions and ends of a message before its rows, and failures, pulls and prefills after them.
Outputs are not joined if that makes too many tokens, if the later ones have prompt logprobs, or if they admit a request
under a handle that the earlier ones still speak of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import LogprobColumns
from quire_common.credit.logprobs import join_logprobs
from quire_scheduler.core.outputs import SessionOutputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_JOINED_TOKENS = 1 << 14
"""The most tokens in one joined message."""


def join(first: SessionOutputs, second: SessionOutputs) -> SessionOutputs | None:
    """Join two outputs into one that has a single row per handle, ordered by handle: its tokens in order, and its last
    finish code. The notes of the second follow those of the first. Returns None if the result is too large for one
    message, or if the second has prompt logprobs or admits a handle that occurs in the first."""
    if len(first.token) + len(second.token) > MOST_JOINED_TOKENS or second.prompt_logprobs:
        return None
    if second.admitted and not _handles(first).isdisjoint(note.handle for note in second.admitted):
        return None
    handle, count = np.concatenate([first.handle, second.handle]), np.concatenate([first.count, second.count])
    order = np.argsort(handle, kind="stable")
    in_order = handle[order]
    last = np.flatnonzero(np.append(in_order[1:] != in_order[:-1], len(in_order) > 0))
    source = _moved(count, order)
    logprobs = join_logprobs([(0, first.logprobs), (len(first.token), second.logprobs)])
    return replace(
        first,
        handle=in_order[last],
        count=np.diff(np.cumsum(count[order])[last], prepend=0).astype(np.int32),
        token=np.concatenate([first.token, second.token])[source],
        finish=np.concatenate([first.finish, second.finish])[order][last],
        logprobs=None if logprobs is None else _reordered(logprobs, source),
        admitted=first.admitted + second.admitted,
        finished=first.finished + second.finished,
        failed=first.failed + second.failed,
        prefilled=first.prefilled + second.prefilled,
        pulled=first.pulled + second.pulled,
    )


def _handles(outputs: SessionOutputs) -> set[int]:
    """Return all handles that occur in rows or notes of the outputs."""
    found: set[int] = set(outputs.handle.tolist())
    found.update(note.handle for note in outputs.admitted)
    found.update(note.handle for note in outputs.finished)
    found.update(note.handle for note in outputs.failed)
    found.update(note.handle for note in outputs.prefilled)
    found.update(note.handle for note in outputs.pulled)
    return found


def _moved(count: NDArray[np.int32], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Reorder consecutive groups of items (`count` items each) by `order`. Returns the index that each item had before,
    item by item in the new order."""
    begin, counts = np.cumsum(count) - count, count[order]
    return np.repeat(begin[order] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _reordered(logprobs: LogprobColumns, source: NDArray[np.intp]) -> LogprobColumns:
    """Return the logprobs of tokens that were reordered; `source` is the index that each token had before."""
    place = np.empty(len(source), np.int32)
    place[source] = np.arange(len(source))
    index = place[logprobs.token_index]
    order = np.argsort(index, kind="stable")
    tops = _moved(logprobs.top_count, order)
    return LogprobColumns(
        index[order],
        logprobs.logprob[order],
        logprobs.rank[order],
        logprobs.top_count[order],
        logprobs.top_id[tops],
        logprobs.top_logprob[tops],
    )
