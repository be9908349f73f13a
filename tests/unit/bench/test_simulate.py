"""The simulator's parts: what its replicas compute, and that policies differ as they should."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.placement.figures import figures
from bench.placement.fleet import Setup, simulate
from bench.placement.replica import Run, SimReplica, Speed
from bench.placement.simulate_pd import ALWAYS, HEAD, row
from bench.placement.trace import BLOCK, TraceRequest, load_trace, make_trace, oracle_hits, scaled
from quire_router.placement.registry import PLACEMENTS

SPEED = Speed(step_s=0.01, row_s=0.001, prefill_tokens_per_s=1000.0, chunk=100, rows=2, page=64, pages=100)


def request(first: int, tokens: int, output: int = 1, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, tokens, output, np.arange(first, first + tokens // 64, dtype=np.uint64))


def run(replica: SimReplica, *requests: TraceRequest) -> list[Run]:
    runs = [Run(one, one.arrival_s) for one in requests]
    for one in runs:
        replica.submit(one)
    replica.advance(replica.now_s + 1000.0)
    replica.check_integrity()
    return runs


def test_a_prompt_takes_its_chunks_and_its_tokens_steps() -> None:
    (one,) = run(SimReplica(SPEED), request(1, 250, output=4))
    assert one.first_s == pytest.approx(3 * 0.01 + 0.25)
    assert one.done_s == pytest.approx(one.first_s + 3 * 0.011)


def test_what_was_computed_is_found_but_for_the_last_token() -> None:
    replica = SimReplica(SPEED)
    first, second, third = run(replica, request(1, 128), request(1, 128), request(1, 200))
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 64, 128)
    assert replica.stored == [1, 2, 3] and not replica.removed


def test_the_least_recently_used_pages_leave_and_tails_go_first() -> None:
    replica = SimReplica(replace(SPEED, pages=8))
    run(replica, request(1, 4 * 64 - 1), request(10, 3 * 64))
    run(replica, request(1, 4 * 64 - 1))
    replica.removed.clear()
    run(replica, request(20, 4 * 64 - 1))
    assert replica.removed == [12, 11] and replica.has(1) and replica.has(10)


def test_no_more_run_than_there_are_rows_and_pages() -> None:
    replica = SimReplica(replace(SPEED, pages=10))
    runs = run(replica, *(request(100 * i, 4 * 64, output=30) for i in range(4)))
    ends = sorted(one.done_s for one in runs)
    assert all(later.first_s >= ends[index] for index, later in enumerate(runs[2:]))


def test_a_trace_is_read_and_its_bursts_are_spread(tmp_path: Path) -> None:
    lines = [
        {"timestamp": t, "input_length": 1100, "output_length": 5, "hash_ids": ids}
        for t, ids in ((0, [0, 1, 2]), (0, [0, 3, 4]), (3000, [0, 1, 5]))
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    a, b, c = load_trace(file, 64)
    pages = BLOCK // 64
    assert len(a.keys) == 1100 // 64 and a.keys[:pages].tolist() == b.keys[:pages].tolist()
    assert a.keys[: 2 * pages].tolist() == c.keys[: 2 * pages].tolist() and a.keys[pages] != b.keys[pages]
    assert [round(one.arrival_s, 3) for one in scaled([a, b, c], 6.0)] == [0.0, 3.0, 6.0]
    assert oracle_hits([a, b, c], 64, 1000) == pytest.approx((pages + 2 * pages) * 64 / 3300)
    assert oracle_hits([a, b, c], 64, 4) < 0.2


@pytest.mark.parametrize("policy", PLACEMENTS)
def test_every_policy_ends_every_request(policy: str) -> None:
    requests = scaled(make_trace(120, 64), 20.0)
    outcome = simulate(requests, Setup(policy=policy, replicas=3))
    assert len(outcome.runs) == 120 and all(one.done_s >= one.first_s > one.arrived_s for one in outcome.runs)
    assert 0 < outcome.busy <= 1


def test_kv_aware_finds_more_than_round_robin_and_about_what_an_oracle_does() -> None:
    requests = scaled(make_trace(400, 64), 60.0)
    found = {p: figures(simulate(requests, Setup(policy=p, replicas=8))) for p in ("kv_aware", "round_robin")}
    oracle = oracle_hits(requests, 64, 8 * Speed.pages)
    assert found["kv_aware"].hit_rate > 0.8 * oracle > 1.2 * found["round_robin"].hit_rate


def test_separate_pools_keep_prompts_away_from_decoding_rows() -> None:
    requests = scaled(make_trace(200, 64), 20.0)
    together = figures(simulate(requests, Setup(replicas=4)))
    always = Setup(replicas=4, prefill=2, split=ALWAYS)
    slow, fast = simulate(requests, replace(always, bandwidth=1e9)), simulate(requests, always)
    apart = figures(fast)
    assert apart.apart > 0.9 and apart.itl[1] < 0.5 * together.itl[1]
    assert sum(one.done_s for one in slow.runs) > sum(one.done_s for one in fast.runs)


def test_what_was_not_measured_is_a_dash() -> None:
    requests = scaled(make_trace(40, 64), 8.0)
    place = HEAD.split("|").index(" 2nd token p50 / p99 ms ")
    together, apart = (
        row("", figures(simulate(requests, Setup(replicas=2, prefill=prefill, split=ALWAYS)))) for prefill in (0, 1)
    )
    assert together.split("|")[place].strip() == "-"
    assert all(float(part) > 0 for part in apart.split("|")[place].split("/"))


def test_the_decision_keeps_what_always_and_never_lose() -> None:
    """With few prefill replicas their queue is not waited for; over a slow way nothing is sent."""
    requests = scaled(make_trace(300, 64), 25.0)
    few = Setup(replicas=4, prefill=1)
    decided, always = (figures(simulate(requests, one)) for one in (few, replace(few, split=ALWAYS)))
    assert 0.05 < decided.apart < 0.9 < always.apart
    assert decided.ttft[1] < always.ttft[1] and decided.goodput > always.goodput
    slow = figures(simulate(requests, replace(few, bandwidth=5e7)))
    assert slow.apart < 0.5 * decided.apart, slow


def test_pages_that_the_decode_side_has_are_not_sent_again() -> None:
    same = [request(1, 6400, output=5, at=200.0 * i) for i in range(4)]
    setup = Setup(replicas=2, prefill=1, split=ALWAYS, speed=replace(SPEED, pages=1000), bandwidth=1e7)
    outcome = simulate(same, setup)
    assert outcome.apart == 4
    assert outcome.seconds[0] > 10 * outcome.seconds[-1]


def test_over_slow_networks_hosts_that_are_known_keep_pages_within_them() -> None:
    requests = scaled(make_trace(200, 64), 25.0)
    told = Setup(replicas=4, prefill=2, per_host=2, bandwidth=2e8)
    known, unknown = (figures(simulate(requests, replace(told, tells_hosts=tells))) for tells in (True, False))
    assert known.apart > 1.5 * unknown.apart, (known, unknown)
    assert known.goodput > unknown.goodput
