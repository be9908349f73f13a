"""A list of many integers in a body is checked in a small part of what it takes to look at each in Python."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire_common.errors import QuireError
from quire_common.logit_controls import MAX_ALLOWED_TOKENS
from quire_router.front.parameters.fields import check_fields
from quire_router.front.parameters.tables import SAMPLING

TABLE = {"allowed_token_ids": SAMPLING["allowed_token_ids"]}


def checked(ids: Any) -> Any:
    return check_fields({"allowed_token_ids": ids}, TABLE)["allowed_token_ids"]


def cpu_s(ids: list[Any]) -> float:
    began = time.thread_time()
    for _ in range(5):
        checked(ids)
    return time.thread_time() - began


def test_integers_take_less_than_half_the_time_of_what_is_looked_at_one_by_one() -> None:
    ids: list[Any] = list(range(MAX_ALLOWED_TOKENS))
    assert cpu_s(ids) < cpu_s([*ids[:-1], 7.0]) / 2.5


@pytest.mark.parametrize("ids", [[], [0], [0, 2**31 - 1], [3.0, 4]])
def test_lists_come_out_as_integers(ids: list[Any]) -> None:
    found = checked(ids)
    assert found == tuple(map(int, ids))
    assert all(type(each) is int for each in found)


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([1, -1], "OUT_OF_RANGE"),
        ([1, 2**31], "OUT_OF_RANGE"),
        ([1, True], "BAD_TYPE"),
        ([1, "2"], "BAD_TYPE"),
        ([1, 2.5], "BAD_TYPE"),
        ([1, None], "BAD_TYPE"),
        ([1, [2]], "BAD_TYPE"),
    ],
)
def test_what_is_wrong_with_one_of_many_is_said(ids: list[Any], code: str) -> None:
    with pytest.raises(QuireError) as caught:
        checked(ids)
    assert (caught.value.code, caught.value.param) == (code, "allowed_token_ids[]")
