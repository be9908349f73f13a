"""Columns per session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import Logprobs
from quire_common.errors import Internal
from quire_scheduler.outputs import (
    AdmittedNote,
    FailedNote,
    FinishedNote,
    FinishReason,
    OutputBuffer,
    PrefilledNote,
    PulledNote,
    Rows,
    SessionOutputs,
    join_rows,
)

ONE_LOGPROB = Logprobs(np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.int32), np.zeros(1, np.int32))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows(session: np.ndarray, count: np.ndarray, token: np.ndarray, logprobs: Logprobs | None = None) -> Rows:
    n = len(session)
    return Rows(session, np.arange(n, dtype=np.int32) + 10, count, token, np.zeros(n, np.uint8), logprobs)


def test_one_session_gets_the_very_columns() -> None:
    buffer, token = OutputBuffer(), ids(7, 8)
    buffer.add_rows(rows(ids(3, 3), ids(1, 1), token))
    (out,) = buffer.take()
    assert out.session == 3 and out.token is token
    assert buffer.take() == []


def test_sessions_are_split_with_their_tokens_and_logprobs() -> None:
    logprobs = Logprobs(
        ids(0, 2, 4),
        np.array([-1, -2, -3], np.float32),
        ids(1, 2, 3),
        ids(1, 0, 2),
        ids(50, 51, 52),
        np.array([-5, -6, -7], np.float32),
    )
    buffer = OutputBuffer()
    buffer.add_rows(rows(ids(1, 2, 1), ids(2, 1, 2), ids(100, 101, 200, 102, 103), logprobs))
    first, second = sorted(buffer.take(), key=lambda out: out.session)
    assert first.handle.tolist() == [10, 12] and first.token.tolist() == [100, 101, 102, 103]
    assert second.handle.tolist() == [11] and second.token.tolist() == [200]
    assert first.logprobs is not None and second.logprobs is not None
    assert first.logprobs.token_index.tolist() == [0, 3]
    assert first.logprobs.top_id.tolist() == [50, 51, 52]
    assert second.logprobs.token_index.tolist() == [0] and second.logprobs.logprob.tolist() == [-2]


def test_steps_and_notes_join_in_order() -> None:
    one = Logprobs(ids(1), np.array([-1], np.float32), ids(1), ids(0))
    buffer = OutputBuffer()
    buffer.admitted(1, AdmittedNote(10, 0, 16))
    buffer.add_rows(rows(ids(1, 1), ids(1, 1), ids(5, 6)))
    buffer.add_rows(rows(ids(1, 1), ids(1, 1), ids(7, 8), one))
    buffer.aborted(1, FinishedNote(99, 1, 0, 0, -1, []))
    buffer.failed(2, FailedNote(4, Internal("X", "", "")))
    first, second = sorted(buffer.take(), key=lambda out: out.session)
    assert first.handle.tolist() == [10, 11, 10, 11, 99]
    assert first.count.tolist() == [1, 1, 1, 1, 0]
    assert first.finish.tolist() == [0, 0, 0, 0, FinishReason.ABORT]
    assert first.token.tolist() == [5, 6, 7, 8]
    assert first.logprobs is not None and first.logprobs.token_index.tolist() == [3]
    assert first.admitted[0].cached_tokens == 16 and first.finished[0].handle == 99
    assert len(second.handle) == 0 and second.failed[0].handle == 4


def test_a_session_that_left_is_forgotten() -> None:
    buffer = OutputBuffer()
    buffer.aborted(1, FinishedNote(99, 1, 0, 0, -1, []))
    buffer.forget(1)
    assert buffer.take() == []


def outputs(rows: list[tuple[int, list[int], int]]) -> SessionOutputs:
    """Of (handle, tokens, finish)."""
    handles, tokens, finishes = zip(*rows, strict=True) if rows else ((), (), ())
    token = ids(*(token for each in tokens for token in each))
    return SessionOutputs(1, ids(*handles), ids(*map(len, tokens)), token, np.array(finishes, np.uint8))


def by_handle(*told: SessionOutputs) -> dict[int, tuple[list[int], int]]:
    """All tokens of each handle in order, and its last finish."""
    found: dict[int, tuple[list[int], int]] = {}
    for out in told:
        at = 0
        for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
            found[handle] = found.get(handle, ([], 0))[0] + out.token[at : at + count].tolist(), finish
            at += count
    return found


ROWS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2)), min_size=1)


@given(st.tuples(ROWS, ROWS, ROWS))
def test_rows_of_steps_join_to_one_row_a_request(steps: tuple[list[tuple[int, list[int], int]], ...]) -> None:
    first, second, third = map(outputs, steps)
    wanted = by_handle(first, second, third)
    joined = join_rows(first, second)
    joined = None if joined is None else join_rows(joined, third)
    assert joined is not None and by_handle(joined) == wanted and len(joined.handle) == len(wanted)
    columns = (joined.handle, joined.count, joined.token, joined.finish)
    assert [column.dtype.name for column in columns] == ["int32", "int32", "int32", "uint8"]


def test_notes_of_the_first_stay_with_the_joined_rows() -> None:
    first = replace(outputs([(3, [7], 1)]), finished=[FinishedNote(3, 1, 1, 0, -1, [])])
    joined = join_rows(first, outputs([(4, [8, 9], 0)]))
    assert joined is not None and joined.finished == first.finished
    assert by_handle(joined) == {3: ([7], 1), 4: ([8, 9], 0)}


@pytest.mark.parametrize(
    "note",
    [
        {"admitted": [AdmittedNote(1, 0, 0)]},
        {"finished": [FinishedNote(1, 1, 1, 0, -1, [])]},
        {"failed": [FailedNote(1, Internal("X", "", ""))]},
        {"prefilled": [PrefilledNote(1, [])]},
        {"pulled": [PulledNote(1, 0, 1, 5, None)]},
        {"logprobs": ONE_LOGPROB},
    ],
)
def test_a_step_that_tells_more_than_rows_joins_none(note: dict[str, object]) -> None:
    row = outputs([(1, [5], 0)])
    assert join_rows(row, row) is not None
    assert join_rows(row, replace(row, **note)) is None  # type: ignore[arg-type]  # one field, by name


def test_logprobs_and_notes_without_rows_are_joined_by_none() -> None:
    row, nothing = outputs([(1, [5], 0)]), outputs([])
    assert join_rows(replace(row, logprobs=ONE_LOGPROB), row) is None
    assert join_rows(nothing, row) is None, "nobody waits for rows that are sent behind a note"
    many = outputs([(1, [5] * (1 << 13), 0)])
    assert join_rows(many, many) is not None and join_rows(outputs([(1, [5] * (1 << 14), 0)]), row) is None
