"""Assertions count under `python -O` too, which `make test-optimized` runs tests under."""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from quire_common.errors import require


def test_an_assertion_of_a_test_fails_it() -> None:
    with pytest.raises(AssertionError):
        assert len("abc") == 4


@pytest.mark.parametrize("helper", ["tests.fakes.scheduler.scheduler_rig", "tests.redis_server"])
def test_assertions_of_helpers_are_rewritten_so_that_they_count(helper: str) -> None:
    spec = importlib.import_module(helper).__spec__
    assert isinstance(spec, ModuleSpec) and isinstance(spec.loader, AssertionRewritingHook)


def test_require_raises_where_our_own_state_contradicts_itself() -> None:
    require(True, "a page has one owner")
    with pytest.raises(AssertionError, match="a page has one owner"):
        require(False, "a page has one owner")
