"""Penalties have vLLM's bounds, and a repetition penalty is one that float32 holds."""

from __future__ import annotations

import math

import pytest

from quire_common.errors import InvalidArgument
from quire_common.logit_controls import LogitControls, check_controls


@pytest.mark.parametrize("value", [1e-37, 2.0**-126, 0.5, 1.0, 2.0, 1e30])
def test_a_repetition_penalty_above_zero_is_possible(value: float) -> None:
    check_controls(LogitControls(repetition_penalty=value))


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, 1e-46, 1e-45, 1e-38, 1e39, math.inf, -math.inf, math.nan])
def test_one_that_float32_does_not_hold_is_refused(value: float) -> None:
    with pytest.raises(InvalidArgument, match="repetition_penalty") as raised:
        check_controls(LogitControls(repetition_penalty=value))
    assert raised.value.param == "repetition_penalty"


@pytest.mark.parametrize("value", [-2.1, 2.1, math.inf, math.nan])
def test_the_other_penalties_go_from_minus_two_to_two(value: float) -> None:
    for good in (-2.0, 0.0, 2.0):
        check_controls(LogitControls(presence_penalty=good, frequency_penalty=good))
    with pytest.raises(InvalidArgument, match="presence_penalty"):
        check_controls(LogitControls(presence_penalty=value))
    with pytest.raises(InvalidArgument, match="frequency_penalty"):
        check_controls(LogitControls(frequency_penalty=value))
