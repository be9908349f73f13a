"""Detokenizes a step with many tokens in several turns, so that other streams go on in between. The texts are the same
as those of the whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_tokenizer.detokenize.detokenizer import TokenRows, bad_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_tokenizer.detokenize.detokenizer import StepText

# The most tokens of one turn, which takes 2 ms, or some 50 ms with the library's decoder.
TURN_TOKENS = 2048


def step_in_turns(step: Callable[[TokenRows, StepText], None], rows: TokenRows, answer: StepText) -> Iterator[None]:
    """Call `step` with at most TURN_TOKENS tokens at a time, and yield after each call. If a row was cut, its parts
    become one row in `answer`. The reasoning count of such a row may come more than once. A step with a negative token
    id, which no engine sends, is taken by one call. Raises BAD_COLUMN if the counts contradict the tokens."""
    counted = int(rows.count.sum(dtype=np.int64))
    if counted != len(rows.token) or int(rows.count.min(initial=0)) < 0:
        raise bad_rows(counted, len(rows.token))
    if int(rows.token.min(initial=0)) < 0:
        # The request of such a row gets an error and no text, so no part of the row may be decoded before.
        step(rows, answer)
        yield
        return
    for turn, goes_on in _turns(rows):
        told = len(answer.handle)
        step(turn, answer)
        # Join the rest of a row that the last turn began. A row whose request has ended has no rest in `answer`.
        if goes_on and told and len(answer.handle) > told and answer.handle[told] == int(turn.handle[0]):
            answer.text[told - 1] += answer.text.pop(told)
            answer.used[told - 1] += answer.used.pop(told)
            answer.stop_index[told - 1] = answer.stop_index.pop(told)
            del answer.handle[told]
        yield


def _turns(rows: TokenRows) -> Iterator[tuple[TokenRows, bool]]:
    """Cut the rows into turns of at most TURN_TOKENS tokens. Yields (turn, continues) for each turn; with `continues`,
    its first row continues the last row of the turn before. Of a cut row, only the last piece has the row's
    `finish`."""
    handles, counts, finishes = list[int](), list[int](), list[int]()
    start = at = 0
    goes_on = False
    for handle, count, finish in zip(rows.handle.tolist(), rows.count.tolist(), rows.finish.tolist(), strict=True):
        left = count
        while at - start + left > TURN_TOKENS:
            part = TURN_TOKENS - (at - start)
            at, left = at + part, left - part
            yield _rows([*handles, handle], [*counts, part], [*finishes, 0], rows, start, at), goes_on
            handles, counts, finishes, start, goes_on = [], [], [], at, True
        handles.append(handle)
        counts.append(left)
        finishes.append(finish)
        at += left
    yield _rows(handles, counts, finishes, rows, start, at), goes_on


def _rows(
    handles: list[int], counts: list[int], finishes: list[int], rows: TokenRows, start: int, end: int
) -> TokenRows:
    """Make a turn of these columns, with the step's tokens from `start` to `end`."""
    return TokenRows(
        np.array(handles, np.int32), np.array(counts, np.int32), rows.token[start:end], np.array(finishes, np.uint8)
    )
