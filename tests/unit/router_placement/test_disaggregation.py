"""Disaggregation chooses a prefill and a decode replica by estimates, checked by hand on small tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire_router.placement.disaggregation import SplitOptions
from quire_router.placement.placement_request import PlacementRequest
from quire_router.placement.replica_table import DECODE, PREFILL
from tests.unit.router_placement.fleet import PAGE, Fleet, model, sequence

# A page is 1 byte in the tests' geometry.
TOKEN_BYTES = 1 / PAGE


def fleet(*roles: str, policy: str = "kv_aware", **options: Any) -> Fleet:
    found = Fleet(
        policy, 0, split=SplitOptions(**{"least_tokens": 10, "threshold_tokens": 100, "interference": 0.1, **options})
    )
    for index, role in enumerate(roles):
        found.add(f"replica-{index}", role)
    return found


def test_roles_may_change() -> None:
    found = fleet("prefill", "decode", "both")
    rows = found.table.accepting_rows("m", None, 0)
    assert found.table.role[rows].tolist() == [PREFILL, DECODE, PREFILL | DECODE]
    assert found.table.prefills(rows, whole_too=False).tolist() == [0]
    assert found.table.prefills(rows, whole_too=True).tolist() == [0, 2]
    assert found.table.decodes(rows).tolist() == [1, 2]
    found.rows[0].publish(accepts=True, model=found.model, role="decode")
    assert found.table.decodes(rows).tolist() == [0, 1, 2]
    found.rows[1].drop()
    assert not found.table.role[1]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("prefill", "decode"), (0, 1)),
        (("decode", "decode"), (None, 0)),
        (("both", "both"), (None, 0)),
        (("prefill", "prefill"), (None, 0)),  # nobody decodes: a prefill replica runs it whole
        (("prefill", "both"), (0, 1)),
    ],
)
def test_disaggregation_needs_a_prefill_and_a_decode_replica(
    roles: tuple[str, ...], expected: tuple[int | None, int]
) -> None:
    assert fleet(*roles).sides(sequence(200)) == expected


def test_replicas_of_both_roles_prefill_for_others_if_configured() -> None:
    found = fleet("both", "both", whole_too=True)
    found.load(1, waiting_tokens=5000)
    found.load(0, running=10)
    prefill, decode = found.sides(sequence(200))
    assert {prefill, decode} == {0, 1}


def test_engines_of_another_model_or_pool_do_not_prefill() -> None:
    found = fleet("decode")
    found.add("other weights", "prefill", model(digest=b"e"))
    found.add("other pages", "prefill", model(namespace=b"o" * 32))
    assert found.sides(sequence(200)) == (None, 0)
    found.add("same", "prefill")
    assert found.sides(sequence(200)) == (3, 0)


@pytest.mark.parametrize(("tokens", "remote"), [(9, False), (99, False), (100, True)])
def test_token_threshold_decides_without_measured_rates(tokens: int, remote: bool) -> None:
    assert fleet("prefill", "decode").sides(sequence(tokens)) == ((0, 1) if remote else (None, 1))


def test_cached_tokens_do_not_count_towards_the_threshold() -> None:
    found, wanted = fleet("prefill", "decode"), sequence(20 * PAGE)
    found.hold(1, wanted, pages=14)
    assert found.sides(wanted) == (None, 1)  # 96 to compute
    found = fleet("prefill", "decode")
    found.store(wanted)  # what a kvstore has counts half: 16 to compute, 304 to load
    assert found.sides(wanted) == (0, 1)
    blind = fleet("prefill", "decode", policy="round_robin")
    blind.hold(1, wanted)
    assert blind.sides(wanted) == (0, 1)


def rated(pull_s: float, *, prefill: float = 1000.0, **options: Any) -> Fleet:
    """1000 prompt tokens take a second to compute, and `pull_s` to pull."""
    found = fleet("prefill", "decode", **options)
    found.measured(0, prefill=prefill)
    found.measured(1, prefill=1000.0, pull=1000 * TOKEN_BYTES / pull_s)
    return found


def test_load_on_the_decode_side_makes_remote_prefill_worthwhile() -> None:
    long = sequence(1000)
    assert rated(0.5).sides(long) == (None, 1)
    waits = rated(0.5)
    waits.measured(1, pull=1000 * TOKEN_BYTES / 0.5, waiting_prefill_tokens=600)
    assert waits.sides(long) == (0, 1)
    decodes = rated(0.5)
    decodes.measured(1, pull=1000 * TOKEN_BYTES / 0.5, running=6)  # 6 sequences at 0.1: 0.6 s more
    assert decodes.sides(long) == (0, 1)
    assert decodes.table.prefill_rate[1] == pytest.approx(1000, rel=0.01)  # it computes nothing now, and still can
    decodes.measured(0, prefill=1000.0, waiting_prefill_tokens=700)
    assert decodes.sides(long) == (None, 1)


def test_faster_prefill_must_outweigh_the_transfer_time() -> None:
    long = sequence(1000)
    assert rated(0.5, prefill=2000.0).sides(long) == (0, 1)  # half a second there
    assert rated(1.1, prefill=2000.0).sides(long) == (None, 1)


def test_token_threshold_decides_if_rates_are_disabled() -> None:
    assert rated(0.5, by_rates=False).sides(sequence(1000)) == (0, 1)
    assert rated(0.5, by_rates=False).sides(sequence(99)) == (None, 1)


def test_pages_on_both_sides_lower_the_estimates() -> None:
    long = sequence(1000)
    found = rated(0.9)
    found.hold(0, long)
    assert found.sides(long) == (0, 1)  # 8 tokens to compute there, and 0.9 s to pull: less than the second here
    found.hold(1, long, pages=60)  # 40 to compute here, 0.04 s to pull them
    assert found.sides(long) == (0, 1)
    found.hold(0, sequence(1000, 5))
    slow = rated(0.9)
    slow.hold(1, long, pages=60)  # nothing is computed there already
    assert slow.sides(long) == (None, 1)


def test_slow_prefill_rate_is_bounded_below() -> None:
    found = rated(0.1, prefill=50.0)
    assert found.table.rates(np.array([0]))[0] == 500.0
    found.rows[0].measure_prefill(50, 1_000)  # too short a prompt to tell
    assert found.table.prefill_rate[0] == 50.0
    found.rows[0].measure_prefill(400, 200_000)
    assert found.table.prefill_rate[0] == 2000.0
    found.rows[0].measure_prefill(400, 800_000)
    assert found.table.prefill_rate[0] == 2000.0 and found.table.rates(np.array([1]))[0] == 1000.0


def test_unmeasured_replica_gets_the_rate_of_its_peers() -> None:
    found = fleet("prefill", "decode")
    found.measured(1, prefill=1000.0, pull=1e9, waiting_prefill_tokens=500)
    assert found.table.rates(np.array([0]))[0] == 1000.0
    assert found.sides(sequence(90)) == (0, 1)


def test_least_loaded_replica_of_each_side_is_chosen() -> None:
    found, wanted = fleet("prefill", "prefill", "decode", "decode"), sequence(30 * PAGE)
    found.load(0, waiting_tokens=5000)
    found.load(2, running=9)
    assert found.sides(wanted) == (1, 3)
    found.hold(0, wanted)
    found.load(0, waiting_tokens=100)
    assert found.sides(wanted) == (0, 3)
    found.load(2, running=0)
    found.hold(2, wanted, pages=20)
    assert found.sides(wanted) == (0, 2)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "session", "kv_aware"])
def test_every_policy_uses_all_replicas_of_both_sides(policy: str) -> None:
    found = fleet("prefill", "prefill", "decode", "decode", policy=policy)
    taken = [found.sides(sequence(200, seed)) for seed in range(8)]
    assert {prefill for prefill, _ in taken} == {0, 1} and {decode for _, decode in taken} == {2, 3}


def test_round_robin_continues_over_requests_without_remote_prefill() -> None:
    found = fleet("prefill", "decode", "decode", policy="round_robin")
    taken = [found.sides(sequence(200 if index % 2 else 20, index))[1] for index in range(8)]
    assert taken == [1, 2] * 4


def test_reservations_count_until_both_sides_report() -> None:
    found, wanted = fleet("prefill", "decode"), sequence(200)
    placed = found.placer.place_sides(PlacementRequest(wanted), found.table.accepting_rows("m", None, 0))
    assert placed.prefill is not None and (placed.prefill.row, placed.decode.row) == (0, 1)
    rows = np.array([0, 1])
    assert found.table.queue(rows).tolist() == [200, 0]
    assert found.table.load(rows).tolist() == [0.1, 0.1]
    device, _stored = found.view.cached(PlacementRequest(wanted), rows)
    assert device.tolist() == [192, 192]
    placed.prefill.release()
    assert found.table.queue(rows).tolist() == [0, 0]
    assert found.table.pulling_tokens[rows].tolist() == [0, 0]
    placed.decode.start_pull()
    placed.decode.start_pull()
    assert found.table.pulling_tokens[rows].tolist() == [0, 200]
    placed.decode.release()
    placed.decode.release()
    assert found.table.pulling_tokens[rows].tolist() == [0, 0]


def test_pending_pulls_delay_further_pulls() -> None:
    found, waiting = rated(0.4, prefill=2000.0), []
    for seed in range(3):
        placed = found.placer.place_sides(
            PlacementRequest(sequence(1000, seed)), found.table.accepting_rows("m", None, 0)
        )
        (placed.prefill or placed.decode).release()
        placed.decode.start_pull()
        waiting.append(placed)
    # A third would have its pages after 1.2 s, and is computed in one.
    assert [placed.prefill is not None for placed in waiting] == [True, True, False]
    waiting[0].decode.release()
    assert found.sides(sequence(1000, 3)) == (0, 1)


def test_decode_replica_with_fewer_pending_pulls_is_chosen() -> None:
    found = fleet("prefill", "decode", "decode")
    rows = found.table.accepting_rows("m", None, 0)
    first = found.placer.place_sides(PlacementRequest(sequence(3000)), rows)
    first.decode.start_pull()
    found.load(1)
    found.load(2)
    assert found.sides(sequence(200, 1))[1] != [row.row for row in found.rows].index(first.decode.row)
