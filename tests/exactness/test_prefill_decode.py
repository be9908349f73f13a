"""Prefill at one replica and decode at another is one replica that does both, token for token: greedy and seeded, with
pages that come late, in part or wrong, leases that end, workers that are lost, and clients that leave.

`make test` serves some scenarios, `make exactness` 500 requests on the CPU engine and thousands on the paced runner;
`python -m tests.exactness pd paced 17` one.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.exactness.events import Events, require_events, table
from tests.exactness.hunt import require_noticed, run_in_processes, run_plainly
from tests.exactness.mutations import Mutation
from tests.exactness.prefill_decode.pd_judge import judge_pd
from tests.exactness.prefill_decode.pd_mutations import PD_MUTATIONS
from tests.exactness.prefill_decode.pd_scenario import make_pd_scenario
from tests.exactness.prefill_decode.pd_subjects import PdSubjects

QUICK = {"paced": 15, "cpu": 2}
FULL = {"paced": 500, "cpu": 150, "demo": 10, "smollm2": 3}
# Requests of the CPU engine that `make exactness` serves at least.
REQUESTS = 500
# Scenarios that a broken rule may survive at most.
MOST = 100
# Scenarios that went wrong. 432: who lacked a page got none of those that were given back for it, until something else
# happened, and nothing did.
FOUND = (432,)
# Of which every hundred scenarios must have seen this many, or they have lost their bite.
LEAST = {
    "aborted": 60,
    "decode workers lost": 30,
    "ended by a stop id": 80,
    "ended by length": 300,
    "pages pulled": 1000,
    "pages refused": 10,
    "prefill workers lost": 25,
    "prefilled for others": 400,
    "pulled in part": 80,
    "pulled whole": 200,
    "pulls ahead of prefill": 400,
    "pulls broken off": 6,
    "pulls of nothing": 40,
    "requests": 600,
}


run_apart = partial(run_plainly, make=make_pd_scenario, judge=judge_pd)


def report(kind: str, count: int, events: Events) -> None:
    print(f"\n{count} scenarios of prefill and decode apart on the {kind} engine\n{table(events)}")
    # A model's scenarios are too few to have seen everything.
    if kind == "paced":
        require_events(events, count, LEAST)


@pytest.mark.parametrize("kind", QUICK)
def test_split_prefill_and_decode_change_no_token(kind: str) -> None:
    report(kind, QUICK[kind], run_apart(PdSubjects(kind), range(QUICK[kind])))


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_failed_once_pass(seed: int) -> None:
    run_plainly(PdSubjects("paced"), [seed], make_pd_scenario, judge_pd)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_split_prefill_and_decode_change_no_token_at_length(kind: str) -> None:
    events = run_in_processes(run_apart, PdSubjects, kind, FULL[kind])
    report(kind, FULL[kind], events)
    assert kind != "cpu" or events["requests"] >= REQUESTS


@pytest.mark.parametrize("mutation", PD_MUTATIONS, ids=lambda mutation: mutation.name)
def test_broken_handover_rule_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_noticed(mutation, monkeypatch, PdSubjects("paced"), range(MOST), make_pd_scenario, judge_pd)
