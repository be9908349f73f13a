"""What waits for a router, joined: of each request one row with the tokens of several steps. Knows nothing of the wire.

A router takes a message's admissions and ends ahead of its rows, and failures, pulls and prefills after them. So only
what a request says before it is admitted again may not join what its handle's last owner said.
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
"""At most so many in one message."""


def join(first: SessionOutputs, second: SessionOutputs) -> SessionOutputs | None:
    """Join two outputs into one that has a single row per handle, in the order of the handles. Returns None where they
    are too large for one message, where the second has prompt logprobs, or where it admits a handle that the first
    speaks of."""
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
    """Return all handles that rows and notes of the outputs name."""
    found: set[int] = set(outputs.handle.tolist())
    found.update(note.handle for note in outputs.admitted)
    found.update(note.handle for note in outputs.finished)
    found.update(note.handle for note in outputs.failed)
    found.update(note.handle for note in outputs.prefilled)
    found.update(note.handle for note in outputs.pulled)
    return found


def _moved(count: NDArray[np.int32], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Reorder groups of `count` items, and return the index that each item had before."""
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
