from __future__ import annotations

import pytest

from quire_common.errors import InvalidArgument
from quire_common.repetition import MAX_PATTERN_COUNT, RepetitionDetection, check_repetition


@pytest.mark.parametrize(
    "values", [(0, 0, 2), (3, 4, 2), (3, 1, 1), (3, 1, 0), (513, 1, 2), (3, -1, 2), (3, 1, MAX_PATTERN_COUNT + 1)]
)
def test_values_that_make_no_rule_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        check_repetition(RepetitionDetection(*values))


@pytest.mark.parametrize("values", [(1, 0, 2), (512, 512, MAX_PATTERN_COUNT), (3, 1, 2)])
def test_values_at_their_bounds_make_a_rule(values: tuple[int, int, int]) -> None:
    check_repetition(RepetitionDetection(*values))
