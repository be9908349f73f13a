"""Free-running is lockstep, token for token, and both are what each request gets alone: greedy and seeded, under random
arrivals, aborts, stops, preemptions, losses and delays of 0 to 20 ms each way, in virtual time.

`make test` serves some scenarios, `make exactness` thousands; `python -m tests.exactness paced 17` one.
"""

from __future__ import annotations

import pytest

from tests.exactness.events import Events, require_events, table
from tests.exactness.hunt import run_in_processes, run_scenarios
from tests.exactness.scenario import make_scenario
from tests.exactness.subjects import make_subject

QUICK = {"paced": 30, "cpu": 6}
FULL = {"paced": 3000, "cpu": 300, "smollm2": 10}
# Of which every hundred scenarios must have seen this many, or the scenarios have lost their bite.
COMMON = {
    "aborted": 25,
    "continued": 10,
    "ended by a stop id": 10,
    "ended by length": 60,
    "failed moves": 5,
    "hits in the making": 10,
    "kvstore hits": 20,
    "kvstores lost": 4,
    "late rows": 30,
    "local hits": 500,
    "lookups failed": 5,
    "late tokens": 30,
    "pages evicted from the store": 40,
    "pages loaded": 40,
    "pages lost": 10,
    "pages offloaded": 400,
    "pages reused in flight": 60,
    "preemptions": 6,
    "reclaims": 3,
    "reports merged": 10,
    "siblings": 5,
    "slow moves": 5,
    "spares": 80,
    "stalled": 30,
    "starts on loads": 6,
    "stopped in flight": 20,
    "swaps": 2,
    "resubmitted": 5,
    "two in flight": 1000,
}
LEAST = {
    "paced": COMMON | {"late ends": 4, "deadlines exceeded": 3},
    "cpu": COMMON | {"late ends": 1, "kvstore hits": 6, "pages loaded": 6},
}


def report(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios on the {kind} engine\n{table(events)}")
    # A real model's scenarios are too few to have seen everything.
    if kind in LEAST:
        require_events(events, count, LEAST[kind])


@pytest.mark.parametrize("kind", QUICK)
def test_free_running_matches_lockstep(kind: str) -> None:
    report(kind, QUICK[kind], run_scenarios(make_subject(kind), range(QUICK[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_free_running_matches_lockstep_at_length(kind: str) -> None:
    report(kind, FULL[kind], run_in_processes(run_scenarios, make_subject, kind, FULL[kind]))


def test_seed_determines_the_scenario() -> None:
    scale = make_subject("paced").scale
    assert make_scenario(5, scale) == make_scenario(5, scale) != make_scenario(6, scale)
