"""Tokens come out in the order in which they went in, whatever the steps they came by."""

from __future__ import annotations

import numpy as np

from quire_scheduler.batching.token_matrix import TokenMatrix


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_tokens_stay_with_their_slots_while_the_batch_changes() -> None:
    matrix = TokenMatrix(4, width=8)
    matrix.put_tokens(ids(0, 2), np.array([[1, 10], [2, 20]], np.int32))
    matrix.put_tokens(ids(2, 3), np.array([[30, 100]], np.int32))
    assert matrix.count.tolist() == [2, 0, 3, 1]
    assert np.frombuffer(matrix.take_tokens(2), "<i4").tolist() == [10, 20, 30]
    assert matrix.take_tokens(2) == b"" and matrix.count.tolist() == [2, 0, 0, 1]
    matrix.put_tokens(ids(2), np.array([[40]], np.int32))
    assert np.frombuffer(matrix.take_tokens(2), "<i4").tolist() == [40]


def test_full_slot_is_reported() -> None:
    matrix = TokenMatrix(3, width=4)
    matrix.put_tokens(ids(1), np.array([[1], [2], [3]], np.int32))
    assert matrix.full_slots(ids(0, 1), 1).tolist() == []
    assert matrix.full_slots(ids(0, 1), 2).tolist() == [1]


def test_rows_of_different_lengths_go_behind_what_their_slots_have() -> None:
    matrix = TokenMatrix(4, width=8)
    matrix.put_tokens(ids(1, 3), np.array([[1, 30]], np.int32))
    matrix.put_rows(ids(3, 0, 1), ids(2, 0, 3), ids(31, 32, 2, 3, 4))
    matrix.put_rows(ids(1, 2), ids(1, 1), ids(5, 20))
    assert matrix.count.tolist() == [0, 5, 1, 3]
    assert [np.frombuffer(matrix.take_tokens(slot), "<i4").tolist() for slot in range(4)] == [
        [], [1, 2, 3, 4, 5], [20], [30, 31, 32],
    ]  # fmt: skip  # a list per slot


def test_slot_without_room_for_its_own_row_is_reported() -> None:
    matrix = TokenMatrix(3, width=4)
    matrix.put_rows(ids(0, 1), ids(3, 3), ids(1, 2, 3, 4, 5, 6))
    assert matrix.full_slots(ids(0, 1, 2), ids(1, 2, 5)).tolist() == [1, 2]
