"""Each placement policy chooses the right replica."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire_router.placement.registry import PLACEMENTS, Weights
from tests.unit.router_placement.fleet import PAGE, Fleet, sequence


@pytest.mark.parametrize("name", PLACEMENTS)
def test_ties_are_broken_round_robin(name: str) -> None:
    fleet = Fleet(name)
    chosen = []
    for number in range(6):
        placed = fleet.place(sequence(2 * PAGE, seed=number))
        placed.release()
        chosen.append(placed.row)
        for index in range(3):
            fleet.load(index)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_choice_stays_among_the_given_rows(name: str) -> None:
    fleet = Fleet(name, count=6)
    for number in range(30):
        among = [number % 6, (number + 2) % 6]
        assert fleet.place(sequence(100, seed=number), among=sorted(among)).row in among


def test_round_robin_ignores_load() -> None:
    fleet = Fleet("round_robin")
    fleet.load(1, running=10)
    assert [fleet.place(sequence(8)).row for _ in range(4)] == [0, 1, 2, 0]
    assert fleet.place(sequence(8), among=[0, 2]).row == 2


def test_least_loaded_counts_requests_sent_since_the_report() -> None:
    fleet = Fleet("least_loaded")
    fleet.load(0, running=5)
    fleet.load(1, running=3)
    fleet.load(2, running=4)
    assert fleet.place(sequence(8), weight=4).row == 1
    assert fleet.place(sequence(8)).row == 2
    fleet.load(0, running=40, rows=100)
    assert fleet.place(sequence(8)).row == 0


def test_prompt_goes_to_the_replica_with_the_longest_cached_prefix() -> None:
    fleet = Fleet("kv_aware")
    wanted = sequence(20 * PAGE + 3)
    fleet.hold(2, wanted, pages=12)
    fleet.hold(1, wanted, pages=5)
    placed = fleet.place(wanted)
    assert placed.row == 2 and fleet.placer.expected_tokens == 12 * PAGE
    assert fleet.table.pending_tokens[2] == 8 * PAGE + 3


@pytest.mark.parametrize("beyond", (-1, 1))
def test_a_long_queue_outweighs_a_prefix(beyond: int) -> None:
    fleet = Fleet("kv_aware", weights=Weights(cache=2.0))
    wanted = sequence(20 * PAGE + 1)
    fleet.hold(0, wanted, pages=10)
    fleet.load(0, waiting_tokens=2 * 10 * PAGE + beyond)
    assert (fleet.place(wanted).row == 0) == (beyond < 0)


def test_a_full_batch_is_avoided() -> None:
    fleet = Fleet("kv_aware")
    wanted = sequence(20 * PAGE)
    fleet.hold(0, wanted)
    fleet.load(0, running=14)
    assert fleet.place(wanted).row != 0


def test_placed_prompt_attracts_equal_prompts_until_the_expectation_expires() -> None:
    fleet = Fleet("kv_aware", count=4)

    def rows(count: int) -> list[int]:
        placed = [fleet.place(sequence(40 * PAGE)) for _ in range(count)]
        for one in placed:
            one.release()
        for index in range(4):
            fleet.load(index)
        return [one.row for one in placed]

    assert len(set(rows(5))) == 1
    fleet.now_s = 15.0
    before = rows(1)
    fleet.now_s = 50.0
    assert rows(1) != before, "long forgotten: the next in turn is as good"


def test_expected_pages_count_before_they_are_reported() -> None:
    fleet = Fleet("kv_aware")
    wanted = sequence(10 * PAGE)
    row = fleet.place(wanted).row
    holder = int(fleet.table.holder[row])
    assert fleet.directory.pages_of(holder) == 0 and fleet.directory.expected == 10
    fleet.hold(row, wanted)
    fleet.now_s = 100.0
    for index in range(3):
        fleet.load(index)
    fleet.table.pending_tokens[:] = 0
    assert fleet.place(wanted).row == row, "it told of them: they stay"


def test_prefixes_distinguish_salts_groups_and_namespaces() -> None:
    fleet = Fleet("kv_aware", groups=2)
    fleet.hold(1, sequence(10 * PAGE, cache_salt="a"))
    assert fleet.place(sequence(10 * PAGE, cache_salt="a")).row == 1
    assert fleet.placer.expected_tokens == 9 * PAGE, "the last token is always computed"
    fleet.place(sequence(10 * PAGE, cache_salt="b"))
    fleet.place(sequence(10 * PAGE))
    assert fleet.placer.expected_tokens == 9 * PAGE


def test_output_of_an_earlier_attempt_is_part_of_the_prefix() -> None:
    fleet = Fleet("kv_aware")
    whole = sequence(10 * PAGE)
    fleet.hold(2, whole)
    cut = 5 * PAGE + 7
    resumed = sequence(0)
    resumed = type(resumed)(whole.prompt_ids[:cut], whole.stop, output_ids=whole.prompt_ids[cut:])
    assert fleet.place(resumed).row == 2 and fleet.placer.expected_tokens == 9 * PAGE


def test_request_that_skips_the_cache_is_placed_by_load() -> None:
    fleet = Fleet("kv_aware")
    fleet.hold(0, sequence(50 * PAGE))
    fleet.load(0, waiting_tokens=1)
    assert fleet.place(sequence(50 * PAGE, skip_cache_read=True)).row != 0


@pytest.mark.parametrize("stored", (False, True))
def test_kvstore_pages_reduce_the_value_of_a_local_prefix(stored: bool) -> None:
    fleet = Fleet("kv_aware", weights=Weights(cache=1.0, load=0.25))
    wanted = sequence(40 * PAGE + 1)
    fleet.hold(0, wanted)
    fleet.load(0, waiting_tokens=20 * PAGE)
    if stored:
        fleet.store(wanted)
    # Computing all of it costs more than the queue, loading it does not.
    assert (fleet.place(wanted, among=[0, 1]).row == 1) == stored
    assert fleet.placer.expected_tokens == 40 * PAGE


def test_single_replica_needs_no_hashes() -> None:
    fleet = Fleet("kv_aware", count=1)
    fleet.place(sequence(40 * PAGE))
    assert fleet.directory.expected == 0


def test_replicas_without_page_groups_are_placed_by_load() -> None:
    fleet = Fleet("kv_aware", groups=0)
    fleet.load(0, waiting_tokens=5)
    assert fleet.place(sequence(100)).row != 0


def test_session_moves_only_if_its_replica_leaves() -> None:
    fleet = Fleet("session", count=8)
    homes = {f"s{i}": fleet.place(sequence(8), session=f"s{i}").row for i in range(200)}
    assert len(Counter(homes.values())) == 8
    for index in range(8):
        fleet.load(index)
    lost = homes["s0"]
    rest = [index for index in range(8) if index != lost]
    moved = 0
    for session, home in homes.items():
        for index in range(8):
            fleet.load(index)
        again = fleet.place(sequence(8), session=session, among=rest).row
        moved += again != home
        assert again == home or home == lost
    assert moved == Counter(homes.values())[lost]


def test_overloaded_replica_loses_sessions_and_other_requests_go_by_load() -> None:
    fleet = Fleet("session", count=4)
    rows = [fleet.place(sequence(8), session="one").row for _ in range(40)]
    assert len(set(rows)) > 1 and max(Counter(rows).values()) < 30
    fleet.load(0, running=10)
    assert all(fleet.place(sequence(8)).row != 0 for _ in range(5))


def test_placement_considers_a_thousand_replicas() -> None:
    fleet = Fleet("kv_aware", count=1000)
    wanted = sequence(30 * PAGE)
    for index in range(0, 1000, 7):
        fleet.hold(index, wanted, pages=4)
    fleet.hold(993, wanted, pages=20)
    assert fleet.place(wanted).row == 993
    assert np.array_equal(fleet.table.accepting_rows("m", None, 0), np.arange(1000))
