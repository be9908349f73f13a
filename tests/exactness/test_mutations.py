"""The harness notices broken rules: each mutation must go wrong within some scenarios."""

from __future__ import annotations

import pytest

from tests.exactness.hunt import first_wrong, require_noticed
from tests.exactness.mutations import MUTATIONS, Mutation, late_tokens_dropped
from tests.exactness.subject import PacedSubject
from tests.exactness.subjects import make_subject
from tests.tiers import deep_after

# Scenarios that a mutation may survive at most.
MOST = 500
ON_CPU = ("no_fence_for_stopped_slots", "attribution_by_report_time", "watermarks_ignored", "fed_from_another_slot")


@pytest.mark.parametrize("mutation", deep_after(6, MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_rule_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_noticed(mutation, monkeypatch, PacedSubject(), range(mutation.first, mutation.first + MOST))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_broken_rule_is_noticed_on_the_cpu_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    require_noticed(mutation, monkeypatch, make_subject("cpu"), range(MOST))


def test_dropped_late_tokens_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting them is no mistake that anybody could hear: the same tokens are drawn once more."""
    late_tokens_dropped(monkeypatch)
    assert first_wrong(PacedSubject(), range(30)) is None
