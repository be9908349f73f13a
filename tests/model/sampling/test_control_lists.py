"""Siblings' rows share the prepared lists of their controls: the model thread prepares them once a request."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.sampling import control_lists
from quire_worker.sampling.logits_state import LogitsState
from tests.cpu_time import least_cpu_s

SIBLINGS = 32
VOCABULARY = 4000


def largest(bias: float = 1.0) -> LogitControls:
    return LogitControls(
        logit_bias=tuple((token, bias) for token in range(1000)),
        allowed_token_ids=tuple(range(3000)),
        bad_words=tuple((number, number + 1, number + 2) for number in range(1000)),
    )


def row(controls: LogitControls, sample: int = 0) -> LogitsState:
    sampling = Sampling(sample=sample, controls=controls)
    return LogitsState(Sequence(np.array([1, 2], np.int32), Stop(5), sampling))


def test_lists_are_made_once_for_all_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LogitControls] = []

    class Counted(control_lists.ControlLists):
        def __init__(self, controls: LogitControls) -> None:
            made.append(controls)
            super().__init__(controls)

    monkeypatch.setattr(control_lists, "ControlLists", Counted)
    controls = largest()
    rows = [row(controls, number) for number in range(SIBLINGS)]
    for each in rows:
        each.apply(np.zeros(VOCABULARY, np.float32))
    assert len(made) == 1


@pytest.mark.perf
def test_a_siblings_row_is_made_in_a_fraction_of_the_first_ones_time() -> None:
    controls = largest()
    kept = [row(controls)]
    first_s = least_cpu_s(lambda: kept.append(row(largest())), SIBLINGS) - least_cpu_s(largest, SIBLINGS)
    assert least_cpu_s(lambda: kept.append(row(controls)), SIBLINGS) < first_s / 4


def test_rows_of_shared_lists_change_logits_alike_and_by_their_own_output() -> None:
    controls = largest()
    first, second = row(controls), row(controls, 1)
    for token in (7, 8):
        second.fed(token)
    plain, other = np.zeros(VOCABULARY, np.float32), np.zeros(VOCABULARY, np.float32)
    first.apply(plain)
    second.apply(other)
    assert np.isneginf(other[9]) and plain[9] == 1.0
    assert np.array_equal(np.delete(plain, 9), np.delete(other, 9))


def test_lists_go_with_their_controls() -> None:
    gc.collect()  # lists of other tests' controls
    before = len(control_lists._MADE)
    controls = largest()
    made = row(controls)
    assert len(control_lists._MADE) == before + 1
    del controls, made
    gc.collect()
    assert len(control_lists._MADE) == before


def test_equal_controls_of_another_object_have_lists_of_their_own() -> None:
    assert control_lists.lists_of(largest()) is not control_lists.lists_of(largest())
