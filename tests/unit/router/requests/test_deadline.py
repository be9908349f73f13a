"""The timeout of a request is the shortest of its limits."""

from __future__ import annotations

import pytest

from quire_router.requests.deadline import shortest_timeout_s


@pytest.mark.parametrize(
    ("remaining_s", "limits_s", "timeout_s"),
    [(None, (0.0, 0.0), 0.0), (None, (0.0, 3.0), 3.0), (5.0, (0.0,), 5.0), (5.0, (4.0, 6.0), 4.0), (1.5, (2.0,), 1.5)],
)
def test_the_shortest_limit_counts(remaining_s: float | None, limits_s: tuple[float, ...], timeout_s: float) -> None:
    assert shortest_timeout_s(remaining_s, *limits_s) == timeout_s


def test_a_deadline_that_has_passed_is_not_endless() -> None:
    assert 0.0 < shortest_timeout_s(0.0, 0.0) <= 0.01
