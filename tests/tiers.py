"""Cases and random examples of a test that run with the deep tests alone. CONTRIBUTING says which tests run when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from hypothesis import settings

Property = TypeVar("Property", bound=Callable[..., None])

# `make test-deep` sets this variable, and runs all tests with the mark `deep` or `examples`.
DEEP = os.environ.get("QUIRE_TEST_DEEP") == "1"
# The number of examples of each such test, for a long search: `QUIRE_SCENARIOS=20000`. 0: not set.
SCENARIOS = int(os.environ.get("QUIRE_SCENARIOS", "0"))


def deep_after(count: int, cases: Iterable[object]) -> list[object]:
    """The cases of a parametrize mark; all but the first `count` are left to `make test-deep`."""
    listed = list(cases)
    return [*listed[:count], *(_deep(case) for case in listed[count:])]


def examples(count: int) -> Callable[[Property], Property]:
    """A property test tries `count` examples with the deep tests, and a quarter of them otherwise."""

    def mark(test: Property) -> Property:
        pytest.mark.examples(test)
        return settings(max_examples=_examples_here(count))(test)

    return mark


def _examples_here(count: int) -> int:
    """A quarter of `count`, or `count` where the deep tests run. `QUIRE_SCENARIOS` overrides both."""
    return SCENARIOS or (count if DEEP else -(-count // 4))


def _deep(case: object) -> object:
    if type(case) is tuple:  # the values of several arguments; a NamedTuple is one value
        return pytest.param(*case, marks=pytest.mark.deep)
    return pytest.param(case, marks=pytest.mark.deep)
