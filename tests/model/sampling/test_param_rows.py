"""Tests of param rows: their numbers, and the word at which a kernel finds each number."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.request_parameters import LIMITS, SAMPLING_NUMBERS
from quire_common.sequence import Sampling
from quire_worker.sampling.param_rows import OFFSETS, PARAM_ROW, WORDS, asks_limits, param_rows, rows_of, words_of

ASKING = {"top_k": 5, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75}


def test_every_number_has_a_word_of_its_own() -> None:
    assert OFFSETS.keys() >= {each.name for each in SAMPLING_NUMBERS} | {"seed", "sample_index", "filtered"}
    assert len(set(OFFSETS.values())) == len(OFFSETS) and WORDS % 2 == OFFSETS["seed"] % 2 == 0
    assert ASKING.keys() == {each.name for each in LIMITS}


@pytest.mark.parametrize("name", ASKING)
def test_a_kernel_reads_what_a_request_asked(name: str) -> None:
    rows = rows_of([Sampling(temperature=1.0), Sampling(temperature=1.0, seed=7, sample=3, **{name: ASKING[name]})])  # type: ignore[arg-type]  # numbers by name
    words = words_of(rows.take([1, 0]))
    kind = PARAM_ROW[name]
    assert words[0, OFFSETS[name] : OFFSETS[name] + 1].view(kind)[0] == ASKING[name]
    assert (words[0, OFFSETS["sample_index"]], rows["seed"][1]) == (3, 7)
    assert words[:, OFFSETS["filtered"]].tolist() == asks_limits(rows)[::-1].tolist() == [1, 0]


@pytest.mark.parametrize("name", ASKING)
def test_limits_of_a_greedy_row_are_not_looked_at(name: str) -> None:
    for temperature in (0.0, 1e-6):
        rows = rows_of([Sampling(temperature=temperature, **{name: ASKING[name]})])  # type: ignore[arg-type]  # numbers by name
        assert rows["filtered"].tolist() == [0]
        assert param_rows(1, temperature=temperature, **{name: ASKING[name]})["filtered"].tolist() == [0]


def test_rows_of_columns_are_those_of_requests() -> None:
    asked = [Sampling(temperature=0.5, top_k=3, seed=2**63 + 1), Sampling(temperature=1.5, typical_p=0.5)]
    rows = param_rows(
        2, temperature=[0.5, 1.5], top_k=[3, 0], typical_p=[1.0, 0.5], seed=np.array([2**63 + 1, 0], "u8")
    )
    assert rows.tolist() == rows_of(asked).tolist()
