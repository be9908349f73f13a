"""Rows that draw no token, one or several in a step change no answer: each request gets what it gets alone, token for
token, in lockstep and free-running, under the same arrivals, aborts, preemptions, losses and delays as with one each.

`make test` serves some scenarios, `make exactness` hundreds.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.exactness.events import Events, require_events, table
from tests.exactness.hunt import require_noticed, run_in_processes, run_scenarios
from tests.exactness.mutations import Mutation
from tests.exactness.scenario import make_yield_scenario
from tests.exactness.subject import PacedSubject
from tests.exactness.subjects import make_subject
from tests.exactness.yield_mutations import MUTATIONS
from tests.tiers import deep_after

QUICK = {"paced": 12, "cpu": 2}
FULL = {"paced": 500, "cpu": 100}
# Every hundred scenarios must have seen this many of each event.
ROWS = {
    "held rows": 800,
    "held first rows": 15,
    "rows of several tokens": 300,
    "ends inside a row": 10,
    "rows with a wrong draft": 200,
    "rows with fewer drafts": 100,
    "two in flight": 800,
}
LEAST = {
    "paced": ROWS | {"late tokens": 10, "preemptions": 6, "resubmitted": 5},
    "cpu": {"held rows": 100, "rows of several tokens": 30},
}
# Scenarios that a mutation may survive at most.
MOST = 200
ON_CPU = ("drafts_kept_unseen", "held_rows_move_on", "drafts_past_the_credit")


run_yields = partial(run_scenarios, make=make_yield_scenario)


def report(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios on the {kind} engine\n{table(events)}")
    require_events(events, count, LEAST[kind])


@pytest.mark.parametrize("kind", QUICK)
def test_rows_of_any_number_of_tokens_change_no_answer(kind: str) -> None:
    report(kind, QUICK[kind], run_yields(make_subject(kind), range(QUICK[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_rows_of_any_number_of_tokens_change_no_answer_at_length(kind: str) -> None:
    report(kind, FULL[kind], run_in_processes(run_yields, make_subject, kind, FULL[kind]))


@pytest.mark.parametrize("mutation", deep_after(4, MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_rule_of_rows_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(mutation.first, mutation.first + MOST)
    require_noticed(mutation, monkeypatch, PacedSubject(), seeds, make_yield_scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_broken_rule_of_rows_is_noticed_on_the_cpu_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    require_noticed(mutation, monkeypatch, make_subject("cpu"), range(MOST), make_yield_scenario)
