"""Splits a step's outputs for one session into pieces of bounded size, so that no message is larger than gRPC permits.

The pieces keep the order in which a router handles the parts of a message: admissions first, then prompt logprobs, then
rows, each finished note with the last row of its request, then the other notes. This module does not know the wire
format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from quire_common.columns import NO_I32, NO_U8
from quire_common.credit import LogprobColumns, PromptLogprobs
from quire_scheduler.core.outputs import SessionOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from quire_scheduler.core.outputs import AdmittedNote

# A step with more bytes is sent as several messages.
PIECE_BYTES = 1024 * 1024
# The estimated bytes of a row, of a token, of a logprobs entry and of each of its alternatives, of a note without a
# ticket, and of a page in a ticket.
_ROW, _TOKEN, _ENTRY, _TOP, _NOTE, _TICKET_PAGE = 9, 4, 16, 8, 512, 34

T = TypeVar("T")


def split_outputs(out: SessionOutputs, most_bytes: int) -> list[SessionOutputs]:
    """Split the outputs into pieces of about `most_bytes` at most: admissions, prompt logprobs, rows with their
    finished notes, then the other notes. A single row, note or entry may be larger. A step that fits, as is usual, is
    returned unchanged as the only piece."""
    if _bytes_of(out) <= most_bytes:
        return [out]
    return [
        *(replace(_nothing(out), admitted=some) for some in _cut(out.admitted, _admitted_bytes, most_bytes)),
        *(replace(_nothing(out), prompt_logprobs=some) for some in _split_prompts(out.prompt_logprobs, most_bytes)),
        *_split_rows(out, most_bytes),
        *(replace(_nothing(out), failed=some) for some in _cut(out.failed, _note_bytes, most_bytes)),
        *(replace(_nothing(out), prefilled=some) for some in _cut(out.prefilled, _note_bytes, most_bytes)),
        *(replace(_nothing(out), pulled=some) for some in _cut(out.pulled, _note_bytes, most_bytes)),
    ]


def _bytes_of(out: SessionOutputs) -> int:
    """Return about how many bytes the outputs take on the wire."""
    notes = len(out.finished) + len(out.failed) + len(out.prefilled) + len(out.pulled)
    total = _ROW * len(out.handle) + _TOKEN * len(out.token) + _NOTE * notes
    if out.logprobs is not None:
        total += _logprob_bytes(out.logprobs)
    if out.admitted:
        total += sum(map(_admitted_bytes, out.admitted))
    if out.prompt_logprobs:
        total += sum(_logprob_bytes(chunk.logprobs) for chunk in out.prompt_logprobs)
    return total


def _logprob_bytes(logprobs: LogprobColumns) -> int:
    return _ENTRY * len(logprobs) + _TOP * len(logprobs.top_id)


def _admitted_bytes(note: AdmittedNote) -> int:
    return _NOTE + (0 if note.ticket is None else _TICKET_PAGE * note.ticket.pages)


def _note_bytes(_note: object) -> int:
    return _NOTE


def _nothing(out: SessionOutputs) -> SessionOutputs:
    return SessionOutputs(out.session, NO_I32, NO_I32, NO_I32, NO_U8)


def _cut(items: Sequence[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield consecutive items in groups of at most `most` bytes; a larger item is a group of its own."""
    group, total = list[T](), 0
    for item in items:
        total += size(item)
        if group and total > most:
            yield group
            group, total = [], size(item)
        group.append(item)
    if group:
        yield group


def _split_prompts(chunks: Sequence[PromptLogprobs], most: int) -> Iterator[list[PromptLogprobs]]:
    parts = [part for chunk in chunks for part in _split_chunk(chunk, most)]
    return _cut(parts, lambda part: _logprob_bytes(part.logprobs), most)


def _split_chunk(chunk: PromptLogprobs, most: int) -> Iterator[PromptLogprobs]:
    """Split one chunk of prompt logprobs by its positions into chunks of at most `most` bytes."""
    sizes = _ENTRY + _TOP * chunk.logprobs.top_count.astype(np.int64)
    for begin, end in _ranges(sizes, most):
        yield PromptLogprobs(chunk.owner, chunk.first + begin, chunk.logprobs.slice(begin, end, begin))


def _split_rows(out: SessionOutputs, most: int) -> Iterator[SessionOutputs]:
    """Yield the rows in pieces of at most `most` bytes, with their tokens and logprobs. A finished note goes with the
    last row of its handle, or with the first piece if its handle has no row. Without any rows, the finished notes are
    pieces of their own."""
    last = {handle: row for row, handle in enumerate(out.handle.tolist())}
    finished = sorted(out.finished, key=lambda note: last.get(note.handle, -1))
    ends, done = np.concatenate([[0], np.cumsum(out.count, dtype=np.int64)]), 0
    for begin, end in _ranges(_row_bytes(out, ends), most):
        due = done
        while due < len(finished) and last.get(finished[due].handle, -1) < end:
            due += 1
        first, after = int(ends[begin]), int(ends[end])
        yield replace(
            _nothing(out),
            handle=out.handle[begin:end],
            count=out.count[begin:end],
            token=out.token[first:after],
            finish=out.finish[begin:end],
            logprobs=_logprobs_of(out.logprobs, first, after),
            finished=finished[done:due],
        )
        done = due
    for some in _cut(finished[done:], _note_bytes, most):
        yield replace(_nothing(out), finished=some)


def _row_bytes(out: SessionOutputs, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each row on the wire, with its tokens and logprobs. `ends` has the number of tokens before
    each row."""
    sizes: NDArray[np.int64] = _ROW + _TOKEN * out.count.astype(np.int64)
    if out.logprobs is not None:
        rows = np.searchsorted(ends, out.logprobs.token_index, side="right") - 1
        np.add.at(sizes, rows, _ENTRY + _TOP * out.logprobs.top_count.astype(np.int64))
    return sizes


def _logprobs_of(logprobs: LogprobColumns | None, first: int, after: int) -> LogprobColumns | None:
    """Return the entries of tokens `first` to `after` (exclusive), with token indices counted from `first`; None if
    there are none."""
    if logprobs is None:
        return None
    begin, end = np.searchsorted(logprobs.token_index, [first, after]).tolist()
    return logprobs.slice(begin, end, first) if begin < end else None


def _ranges(sizes: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (begin, end) of consecutive items whose sizes add up to at most `most`; a larger item has a
    range of its own."""
    ends, begin = np.cumsum(sizes), 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + most, side="right")), begin + 1)
        yield begin, end
        begin = end
