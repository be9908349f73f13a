"""Columns per session."""

from __future__ import annotations

import numpy as np

from quire_common.credit import LogprobColumns
from quire_common.errors import Internal
from quire_common.finish import FinishReason
from quire_scheduler.core.outputs import AdmittedNote, FailedNote, FinishedNote, OutputBuffer, Rows


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows(session: np.ndarray, count: np.ndarray, token: np.ndarray, logprobs: LogprobColumns | None = None) -> Rows:
    n = len(session)
    return Rows(session, np.arange(n, dtype=np.int32) + 10, count, token, np.zeros(n, np.uint8), logprobs)


def test_single_session_gets_columns_without_a_copy() -> None:
    buffer, token = OutputBuffer(), ids(7, 8)
    buffer.add_rows(rows(ids(3, 3), ids(1, 1), token))
    (out,) = buffer.take_outputs()
    assert out.session == 3 and out.token is token
    assert buffer.take_outputs() == []


def test_sessions_are_split_with_their_tokens_and_logprobs() -> None:
    logprobs = LogprobColumns(
        ids(0, 2, 4),
        np.array([-1, -2, -3], np.float32),
        ids(1, 2, 3),
        ids(1, 0, 2),
        ids(50, 51, 52),
        np.array([-5, -6, -7], np.float32),
    )
    buffer = OutputBuffer()
    buffer.add_rows(rows(ids(1, 2, 1), ids(2, 1, 2), ids(100, 101, 200, 102, 103), logprobs))
    first, second = sorted(buffer.take_outputs(), key=lambda out: out.session)
    assert first.handle.tolist() == [10, 12] and first.token.tolist() == [100, 101, 102, 103]
    assert second.handle.tolist() == [11] and second.token.tolist() == [200]
    assert first.logprobs is not None and second.logprobs is not None
    assert first.logprobs.token_index.tolist() == [0, 3]
    assert first.logprobs.top_id.tolist() == [50, 51, 52]
    assert second.logprobs.token_index.tolist() == [0] and second.logprobs.logprob.tolist() == [-2]


def test_steps_and_notes_join_in_order() -> None:
    one = LogprobColumns(ids(1), np.array([-1], np.float32), ids(1), ids(0))
    buffer = OutputBuffer()
    buffer.admitted(1, AdmittedNote(10, 0, 16))
    buffer.add_rows(rows(ids(1, 1), ids(1, 1), ids(5, 6)))
    buffer.add_rows(rows(ids(1, 1), ids(1, 1), ids(7, 8), one))
    buffer.aborted(1, FinishedNote(99, 1, 0, 0, -1, []))
    buffer.failed(2, FailedNote(4, Internal("X", "", "")))
    first, second = sorted(buffer.take_outputs(), key=lambda out: out.session)
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
    assert buffer.take_outputs() == []
