"""StepBatch.put_drafts: rows for which no draft is proposed are removed, and all others stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch, samples_of


def a_batch(known: list[list[int]], drafts: list[int]) -> StepBatch:
    """Sequences with these known tokens, and then room for so many drafts."""
    rows = [[*tokens, *[0] * some] for tokens, some in zip(known, drafts, strict=True)]
    return StepBatch(
        token=np.array([token for row in rows for token in row], np.int64),
        count=np.array([len(row) for row in rows], np.int32),
        position=np.arange(20, 20 + len(rows), dtype=np.int32),
        page_table=np.zeros((len(rows), 1), np.int32),
        sample=np.ones(len(rows), np.bool_),
        params=param_rows(len(rows)),
        logprobs=np.full(len(rows), -1, np.int32),
        drafts=np.array(drafts, np.int32),
    )


def put(batch: StepBatch, *proposed: list[int]) -> list[list[int]]:
    """Put drafts; returns the tokens of each sequence."""
    batch.put_drafts(np.array(proposed, np.int32))
    assert batch.token.dtype == np.int64 and batch.count.dtype == np.int32 and batch.count.sum() == len(batch.token)
    return [rows.tolist() for rows in np.split(batch.token, np.cumsum(batch.count)[:-1])]


def test_drafts_follow_the_token_of_their_sequence() -> None:
    batch = a_batch([[1], [2]], [2, 2])
    assert put(batch, [5, 6], [7, 8]) == [[1, 5, 6], [2, 7, 8]]
    assert batch.drafts.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ([5, -1, -1], [6, 7, 8], [[1, 5], [2, 6, 7, 8]]),
        ([-1, -1, -1], [6, 7, -1], [[1], [2, 6, 7]]),
        ([5, 6, 7], [-1, -1, -1], [[1, 5, 6, 7], [2]]),
        ([5, -1, 7], [-1, 7, 8], [[1, 5], [2]]),
    ],
    ids=["some", "all of the first", "all of the last", "behind a gap"],
)
def test_rows_without_a_draft_are_removed(first: list[int], second: list[int], rows: list[list[int]]) -> None:
    batch = a_batch([[1], [2]], [3, 3])
    assert put(batch, first, second) == rows
    assert batch.drafts.tolist() == [len(row) - 1 for row in rows]


def test_sequence_gets_no_more_drafts_than_it_has_rows_for() -> None:
    batch = a_batch([[1], [2], [3]], [1, 3, 0])
    assert put(batch, [5, 6, 7], [6, 7, 8], [7, 8, 9]) == [[1, 5], [2, 6, 7, 8], [3]]


def test_chunks_of_prompts_beside_drafts_stay_whole() -> None:
    batch = a_batch([[1], [2], [30, 31, 32], [40]], [2, 2, 0, 0])
    assert put(batch, [5, -1], [-1, -1], [-1, -1], [9, 9]) == [[1, 5], [2], [30, 31, 32], [40]]
    assert batch.drafts.tolist() == [1, 0, 0, 0]


def test_step_without_any_draft_left_is_a_plain_step() -> None:
    batch = a_batch([[1], [2], [30, 31]], [2, 1, 0])
    assert put(batch, [-1, -1], [-1, 9], [-1, -1]) == [[1], [2], [30, 31]]
    assert len(batch.drafts) == 0 and samples_of(batch).row.tolist() == [0, 1, 3]


def test_first_sample_keeps_its_position() -> None:
    batch = a_batch([[1], [2], [30, 31]], [3, 3, 0])
    before = samples_of(batch)
    put(batch, [5, -1, -1], [-1, -1, -1], [-1, -1, -1])
    after = samples_of(batch)
    assert after.sequence.tolist() == [0, 0, 1, 2]
    assert after.row.tolist() == [0, 1, 2, 4]
    assert after.sample_position.tolist() == [21, 22, 22, 24]
    assert before.sample_position[before.nth == 0].tolist() == after.sample_position[after.nth == 0].tolist()


def test_columns_that_others_share_are_not_changed() -> None:
    """The engine keeps the number of rows at the launch."""
    batch = a_batch([[1], [2]], [2, 2])
    count, drafts, token = batch.count, batch.drafts, batch.token
    put(batch, [5, -1], [-1, -1])
    assert (count.tolist(), drafts.tolist(), token.tolist()) == ([3, 3], [2, 2], [1, 0, 0, 2, 0, 0])
