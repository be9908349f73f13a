"""Cases of a test that run with the deep tests alone. CONTRIBUTING says which tests run when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def deep_after(count: int, cases: Iterable[object]) -> list[object]:
    """The cases of a parametrize mark; all but the first `count` are left to `make test-deep`."""
    listed = list(cases)
    return [*listed[:count], *(_deep(case) for case in listed[count:])]


def _deep(case: object) -> object:
    if type(case) is tuple:  # the values of several arguments; a NamedTuple is one value
        return pytest.param(*case, marks=pytest.mark.deep)
    return pytest.param(case, marks=pytest.mark.deep)
