from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument
from quire_common.repetition import RepetitionDetection, check_repetition


def by_definition(tokens: list[int], rule: RepetitionDetection) -> bool:
    """Whether the list ends by a pattern of an allowed size, so many times."""
    sizes = range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1)
    return any(
        len(tokens) >= size * rule.min_count and tokens[-size * rule.min_count :] == tokens[-size:] * rule.min_count
        for size in sizes
    )


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.builds(RepetitionDetection, st.integers(1, 5), st.integers(0, 5), st.integers(2, 4)),
)
def test_it_is_found_where_it_is(tokens: list[int], rule: RepetitionDetection) -> None:
    assert rule.found_in(tokens) == by_definition(tokens, rule)


@pytest.mark.parametrize("values", [(0, 0, 2), (3, 4, 2), (3, 1, 1), (3, 1, 0), (513, 1, 2), (3, -1, 2)])
def test_values_that_make_no_rule_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        check_repetition(RepetitionDetection(*values))
