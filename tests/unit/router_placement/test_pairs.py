"""Pairs of prefill and decode replicas are chosen by hosts, pull rates, queues and cached pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.v1 import scheduler_pb2
from quire_router.placement.disaggregation import SplitOptions
from quire_router.placement.load import Load
from quire_router.placement.pair_cost import PairCost
from quire_router.placement.placement_request import PlacementRequest
from quire_router.placement.registry import Weights, policies
from quire_router.placement.replica_table import NEAR_TIMES
from quire_router.replicas.scheduler_client import load_from_pb
from tests.unit.router_placement.fleet import PAGE, Fleet, model, sequence

# A page is 1 byte in the tests' geometry.
TOKEN_BYTES = 1 / PAGE
ALWAYS = SplitOptions(least_tokens=1, threshold_tokens=1, by_rates=False)


def fleet(*members: str, policy: str = "kv_aware", **loads: Any) -> Fleet:
    """Of each its role and its host, as "prefill a"; without a host it tells of none."""
    found = Fleet(policy, 0, split=ALWAYS)
    for member in members:
        role, _, host = member.partition(" ")
        found.add(member, role).set_load(Load("ready", max_num_seqs=10, host=host.encode(), **loads))
    return found


@pytest.mark.parametrize("known", [True, False])
def test_equal_replicas_are_paired_within_a_host(known: bool) -> None:
    rates: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "pull_bytes_per_s": 4000 * TOKEN_BYTES} if known else {}
    found = fleet("prefill a", "prefill b", "decode b", "decode a", **rates)
    taken = [found.sides(sequence(200, seed)) for seed in range(6)]
    assert set(taken) == {(0, 3), (1, 2)}  # in turn


def test_idle_remote_replica_beats_a_busy_one_on_the_same_host() -> None:
    found = fleet("prefill a", "prefill b", "decode a", prefill_tokens_per_s=1000.0, pull_bytes_per_s=500 * TOKEN_BYTES)
    wanted = sequence(1000)  # two seconds from the other host, at most one from its own
    assert found.sides(wanted) == (0, 2)
    found.measured(0, prefill=1000.0, waiting_prefill_tokens=900, host=b"a")
    assert found.sides(wanted) == (0, 2)
    found.measured(0, prefill=1000.0, waiting_prefill_tokens=1100, host=b"a")
    assert found.sides(wanted) == (1, 2)


def test_cached_pages_outweigh_the_transfer() -> None:
    found = fleet("prefill a", "prefill b", "decode a", prefill_tokens_per_s=1000.0, pull_bytes_per_s=500 * TOKEN_BYTES)
    found.hold(1, sequence(1000))
    assert found.sides(sequence(1000)) == (1, 2)


def test_best_pair_need_not_contain_the_best_single_replica() -> None:
    found = fleet("prefill a", "prefill b", "decode b", "decode c", prefill_tokens_per_s=1000.0, pull_bytes_per_s=10.0)
    found.measured(1, prefill=1000.0, waiting_prefill_tokens=100, host=b"b")
    found.rows[2].set_load(Load("ready", running=1, max_num_seqs=1000, pull_bytes_per_s=10.0, host=b"b"))
    assert found.sides(sequence(1000)) == (1, 2)


def test_replicas_without_a_known_host_are_not_near() -> None:
    found = fleet("prefill", "prefill", "decode", "decode")
    named = policies("kv_aware", found.table, found.view, Weights())
    assert not found.table.host.any()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        running = rng.permutation(9)
        for index in range(4):
            found.load(index, int(running[index]), int(rng.integers(3000)))
        wanted = sequence(500, seed)
        # Nothing is measured: each side is the best by itself.
        prefill = named.prefill.choose(PlacementRequest(wanted), np.array([0, 1]))
        assert found.sides(wanted) == (prefill, 2 + int(running[2:4].argmin()))


@pytest.mark.parametrize("seed", range(40))
def test_chosen_pair_has_the_lowest_cost_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = Fleet("kv_aware", 0, split=ALWAYS)
    count = int(rng.integers(2, 12))
    for index in range(count):
        found.add(f"replica-{index}", ("prefill", "decode", "both")[rng.integers(3)])
        host = b"" if rng.random() < 0.2 else b"host %d" % rng.integers(4)
        rates = rng.uniform(100, 2000, 3) * (rng.random(3) < 0.7)
        found.rows[index].set_load(
            Load(
                "ready",
                running=int(rng.integers(12)),
                max_num_seqs=10,
                waiting_prefill_tokens=int(rng.integers(4000)),
                prefill_tokens_per_s=rates[0],
                pull_bytes_per_s=rates[1] * TOKEN_BYTES,
                near_pull_bytes_per_s=rates[2] * TOKEN_BYTES,
                host=host,
            )
        )
    wanted = sequence(640, seed)
    for index in rng.integers(count, size=3).tolist():
        found.hold(index, wanted, pages=int(rng.integers(40)))
    table, pairs = found.table, policies("kv_aware", found.table, found.view, Weights()).pairs
    assert isinstance(pairs, PairCost)
    rows = table.accepting_rows("m", None, 0)
    able, behind = table.prefills(rows, whole_too=False), table.decodes(rows)
    if not len(able) or not len(behind):
        return
    best = pairs.choose(PlacementRequest(wanted), able, behind)
    every = [
        pairs.choose(PlacementRequest(wanted), able[at : at + 1], behind[to : to + 1])
        for at in range(len(able))
        for to in range(len(behind))
    ]
    assert best is not None
    assert best.cost == pytest.approx(min(pair.cost for pair in every if pair is not None))


def test_near_and_far_pull_rates_are_measured_separately() -> None:
    found = fleet("decode a", "decode b")
    rows = np.array([0, 1])
    found.rows[0].measure_pull(100, 1_000_000)
    assert [rates.tolist() for rates in found.table.pull_rates(rows)] == [[100.0] * 2, [100.0 * NEAR_TIMES] * 2]
    found.rows[0].measure_pull(100, 1_000_000 // 8, near=True)
    assert [rates.tolist() for rates in found.table.pull_rates(rows)] == [[100.0] * 2, [800.0] * 2]
    found.rows[1].set_load(Load("ready", pull_bytes_per_s=500.0, near_pull_bytes_per_s=50.0))
    assert [rates.tolist() for rates in found.table.pull_rates(rows)] == [[100.0, 500.0], [800.0, 1000.0]]
    alone = fleet("decode a")
    alone.rows[0].measure_pull(100, 1_000_000, near=True)
    assert [rates.tolist() for rates in alone.table.pull_rates(rows[:1])] == [[100.0 / NEAR_TIMES], [100.0]]


def test_reported_pull_rates_and_hosts_reach_the_table() -> None:
    found = fleet("prefill a", "decode")
    said = scheduler_pb2.Load(phase="ready", pull_bytes_per_s=5, near_pull_bytes_per_s=50, host=b"a")
    found.rows[1].set_load(load_from_pb(said))
    assert found.table.are_near(np.array([1]), 0).all()
    assert [rates.tolist() for rates in found.table.pull_rates(np.array([1]))] == [[5.0], [50.0]]


def test_near_and_far_pulls_are_counted_separately() -> None:
    found = fleet("prefill a", "prefill b", "decode a")
    placed = [
        found.placer.place_sides(PlacementRequest(sequence(300, seed)), found.table.accepting_rows("m", None, 0))
        for seed in range(2)
    ]
    assert [side.prefill.row for side in placed if side.prefill] == [0, 1]  # the first is busy then
    for side in placed:
        side.decode.start_pull()
    assert (found.table.pulling_near_tokens[2], found.table.pulling_tokens[2]) == (300, 300)
    for side in placed:
        side.decode.release()
    assert (found.table.pulling_near_tokens[2], found.table.pulling_tokens[2]) == (0, 0)


def test_hosts_may_change_and_free_host_numbers_are_reused() -> None:
    found = fleet("prefill a", "decode a", "decode b")
    assert found.table.are_near(np.array([1, 2]), 0).tolist() == [True, False]
    for life in range(50):
        found.rows[0].set_load(Load("ready", host=b"life %d" % life))
        assert not found.table.are_near(np.array([1, 2]), 0).any()
    found.rows[0].set_load(Load("ready", host=b"b"))
    assert found.table.are_near(np.array([1, 2]), 0).tolist() == [False, True]
    found.rows[0].set_load(Load("unreachable"))
    assert found.table.host[:3].tolist()[0] == 0 and found.table.host.max() <= 3
    found.rows[1].drop()
    assert found.table.host[1] == found.table.host_hash[1] == 0


def test_round_robin_ignores_hosts() -> None:
    found = fleet("prefill a", "prefill b", "decode b", "decode a", policy="round_robin")
    assert [found.sides(sequence(200, seed)) for seed in range(4)] == [(0, 2), (1, 3)] * 2


def test_pairs_have_the_same_model() -> None:
    found = fleet("decode a")
    found.add("other weights", "prefill", model(digest=b"e")).set_load(Load("ready", max_num_seqs=10, host=b"a"))
    assert found.sides(sequence(200)) == (None, 0)
    found.add("of the other", "decode", model(digest=b"e")).set_load(Load("ready", running=9, max_num_seqs=10))
    assert found.sides(sequence(200)) == (1, 2)
