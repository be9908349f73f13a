"""Sequences with grammars get what they get alone, and so do those beside them, however late masks come, and whatever
becomes of the matcher: in lockstep and free-running, under the same arrivals, aborts, preemptions, losses and delays.

`make test` serves some scenarios, `make exactness` hundreds.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.exactness.events import Events, require_events, table
from tests.exactness.grammar_mutations import MUTATIONS
from tests.exactness.hunt import require_noticed, run_in_processes, run_plainly, run_scenarios
from tests.exactness.mutations import Mutation
from tests.exactness.prefill_decode.pd_judge import judge_pd
from tests.exactness.prefill_decode.pd_scenario import make_constrained_pd_scenario
from tests.exactness.prefill_decode.pd_subjects import PdSubjects
from tests.exactness.scenario import make_constrained_scenario
from tests.exactness.subject import PacedSubject
from tests.exactness.subjects import make_subject

QUICK = {"paced": 14, "cpu": 1}
FULL = {"paced": 500, "cpu": 100}
# Every hundred scenarios must have seen this many of each event.
LEAST = {
    "paced": {
        "constrained": 200,
        "held rows": 800,
        "held first rows": 15,
        "rows of forced tokens": 100,
        "matchers lost": 80,
        "matchers lost with sequences": 20,
        "late tokens": 10,
        "preemptions": 4,
        "resubmitted": 5,
    },
    "cpu": {"constrained": 150, "held rows": 100, "matchers lost": 40, "rows of forced tokens": 10},
}
SPLIT = {"prefilled for others": 100, "pulled whole": 50, "matchers lost": 80}
# Scenarios that a mutation may survive at most.
MOST = 200
ON_CPU = ("row_without_a_mask_is_not_held", "mask_of_another_slot", "lost_process_is_not_replayed")


run_constrained = partial(run_scenarios, make=make_constrained_scenario)
run_constrained_apart = partial(run_plainly, make=make_constrained_pd_scenario, judge=judge_pd)


def report(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios on the {kind} engine\n{table(events)}")
    require_events(events, count, LEAST[kind])


@pytest.mark.parametrize("kind", QUICK)
def test_grammars_change_no_answer_but_their_own(kind: str) -> None:
    report(kind, QUICK[kind], run_constrained(make_subject(kind), range(QUICK[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_grammars_change_no_answer_but_their_own_at_length(kind: str) -> None:
    report(kind, FULL[kind], run_in_processes(run_constrained, make_subject, kind, FULL[kind]))


def report_apart(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios of prefill and decode apart on the {kind} engine\n{table(events)}")
    require_events(events, count, SPLIT)


def test_grammars_go_on_where_decode_is_at_another_replica() -> None:
    report_apart("paced", 10, run_constrained_apart(PdSubjects("paced"), range(10)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("paced", 200), ("cpu", 40)])
def test_grammars_go_on_where_decode_is_at_another_replica_at_length(kind: str, count: int) -> None:
    report_apart(kind, count, run_in_processes(run_constrained_apart, PdSubjects, kind, count))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_broken_rule_of_grammars_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(mutation.first, mutation.first + MOST)
    require_noticed(mutation, monkeypatch, PacedSubject(), seeds, make_constrained_scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_broken_rule_of_grammars_is_noticed_on_the_cpu_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    require_noticed(mutation, monkeypatch, make_subject("cpu"), range(MOST), make_constrained_scenario)
