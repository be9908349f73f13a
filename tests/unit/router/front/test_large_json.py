from __future__ import annotations

import random
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument
from quire_router.front.http.formats import large_json
from quire_router.front.http.formats.large_json import dumps_in_pieces
from quire_router.front.http.parsing.prompts import token_prompt
from tests.tiers import examples

LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=3), v, max_size=4))


@examples(300)
@given(value=VALUES)
def test_json_written_in_pieces_equals_orjson(value: Any) -> None:
    assert dumps_in_pieces(value) == orjson.dumps(value)


def test_long_lists_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"logprob": -1.5, "rank": 3, "decoded_token": "x"}
    answer = {"choices": [{"index": 0, "prompt_logprobs": [None, *[{"7": entry, "9": entry}] * 20_000]}], "usage": {}}
    flat = {"tokens": list(range(100_000)), "strs": ["a"] * 5000}
    pieces: list[bytes] = []

    def dumps(value: Any) -> bytes:
        pieces.append(orjson.dumps(value))
        return pieces[-1]

    monkeypatch.setattr(large_json, "orjson", SimpleNamespace(dumps=dumps))
    for value in (answer, flat):
        assert dumps_in_pieces(value) == orjson.dumps(value)
    assert max(map(len, pieces)) < 200_000


def test_ids_of_a_long_prompt_are_checked_in_linear_time() -> None:
    drawn = random.Random(3)
    ids: list[Any] = [drawn.randrange(2**31) for _ in range(300_000)]
    started = time.thread_time()
    assert token_prompt(ids).ids.tolist() == ids
    assert time.thread_time() - started < 1.0
    for wrong, code in (
        (True, "BAD_TYPE"),
        (False, "BAD_TYPE"),
        ("1", "BAD_TYPE"),
        (1.0, "BAD_TYPE"),
        (None, "BAD_TYPE"),
        (2**70, "TOKEN_OUT_OF_RANGE"),
        (-(2**70), "TOKEN_OUT_OF_RANGE"),
        (-1, "TOKEN_OUT_OF_RANGE"),
        (2**31, "TOKEN_OUT_OF_RANGE"),
    ):
        with pytest.raises(InvalidArgument, match=code):
            token_prompt([*ids, wrong])
        with pytest.raises(InvalidArgument, match=code):
            token_prompt([0, 1, wrong, 1, 0])
    assert token_prompt([0, 1, 0, 2**31 - 1]).ids.tolist() == [0, 1, 0, 2**31 - 1]
    assert token_prompt([]).ids.dtype == np.int32


@pytest.mark.parametrize("items", [0, 1, 1023, 1024, 1025, 5000])
def test_array_is_written_like_its_list(items: int) -> None:
    ids = np.arange(items, dtype=np.int32) * 7
    assert dumps_in_pieces({"tokens": ids}) == orjson.dumps({"tokens": ids.tolist()})


def test_writing_many_ids_takes_little_memory() -> None:
    """A list of them takes 36 bytes each before a byte of JSON is written."""
    ids = np.full(500_000, 123_456, np.int32)
    tracemalloc.start()
    try:
        written = dumps_in_pieces({"tokens": ids})
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * len(written)
