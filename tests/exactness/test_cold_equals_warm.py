"""Cold equals warm: conversations over a prefix cache, few pages, preemptions, a kvstore with tiers and its faults, and
a second replica that shares it, are answered to the last token and logprob as without any cache, greedy and seeded.

`make test` serves some scenarios, `make exactness` 500; `python -m tests.exactness warm paced 17` one.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.exactness.events import Events, require_events, table
from tests.exactness.hunt import first_wrong, require_noticed, run_in_processes, run_scenarios
from tests.exactness.mutations import Mutation
from tests.exactness.subject import PacedSubject
from tests.exactness.subjects import make_subject
from tests.exactness.warm.cache_mutations import CACHE_MUTATIONS, rot_not_seen_by_the_store
from tests.exactness.warm.warm_judge import judge_warm
from tests.exactness.warm.warm_scenario import make_warm_scenario
from tests.tiers import deep_after

QUICK = {"paced": 18, "cpu": 1}
FULL = {"paced": 400, "cpu": 75, "demo": 25, "smollm2": 6}
# Scenarios that a broken rule may survive at most.
MOST = 150
# Of which every hundred scenarios must have seen this many, or they have lost their bite.
LEAST = {
    "aborted": 20,
    "first replica: local hits": 5000,
    "first replica: kvstore hits": 25,
    "second replica: local hits": 4000,
    "second replica: kvstore hits": 150,
    "hits in the making": 300,
    "kvstores lost": 20,
    "lookups failed": 30,
    "lost with leases out": 4,
    "pages from below": 100,
    "pages refused": 30,
    "preemptions": 25,
    "rot below found": 5,
    "schedulers lost": 4,
    "siblings": 80,
    "spoiled: get": 5,
    "spoiled: put": 80,
}


run_warm = partial(run_scenarios, make=make_warm_scenario, judge=judge_warm)


def report(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios with and without caches on the {kind} engine\n{table(events)}")
    # A model's scenarios are too few to have seen everything.
    if kind == "paced":
        require_events(events, count, LEAST)


@pytest.mark.parametrize("kind", deep_after(1, QUICK))
def test_caches_change_no_token(kind: str) -> None:
    report(kind, QUICK[kind], run_warm(make_subject(kind), range(QUICK[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_caches_change_no_token_at_length(kind: str) -> None:
    report(kind, FULL[kind], run_in_processes(run_warm, make_subject, kind, FULL[kind]))


@pytest.mark.parametrize("mutation", deep_after(3, CACHE_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_cache_rule_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(mutation.first, mutation.first + MOST)
    require_noticed(mutation, monkeypatch, PacedSubject(), seeds, make_warm_scenario, judge_warm)


@pytest.mark.deep
def test_worker_notices_damage_that_the_kvstore_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    rot_not_seen_by_the_store(monkeypatch)
    assert first_wrong(PacedSubject(), range(6), make_warm_scenario, judge_warm, prefix_cache=False) is None
