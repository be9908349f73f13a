"""The router tells a scheduler how much of a prompt any cache holds, if it knows all caches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router_placement.fleet import PAGE, Fleet, model, sequence

LIFE = 7


def a_fleet(count: int = 3, **fields: Any) -> Fleet:
    """All replicas share a kvstore that is followed."""
    fleet = Fleet("kv_aware", count, **fields)
    fleet.follow(LIFE, *range(count))
    return fleet


@pytest.mark.parametrize("count", (1, 3))
def test_cold_prompt_has_no_held_tokens(count: int) -> None:
    fleet = a_fleet(count)
    fleet.store(sequence(10 * PAGE, seed=1))
    assert fleet.place(sequence(10 * PAGE, seed=2)).held_tokens == 0


@pytest.mark.parametrize("count", (1, 3))
def test_held_tokens_include_kvstore_pages(count: int) -> None:
    fleet = a_fleet(count)
    fleet.store(sequence(10 * PAGE, seed=1))
    assert fleet.place(sequence(10 * PAGE + 5, seed=1)).held_tokens == 10 * PAGE


def test_held_tokens_include_pages_of_other_engines() -> None:
    fleet = a_fleet()
    wanted = sequence(10 * PAGE)
    fleet.hold(2, wanted, pages=4)
    fleet.store(sequence(10 * PAGE, seed=1))
    assert fleet.place(wanted, among=[0]).held_tokens == 4 * PAGE


def test_held_tokens_include_pages_expected_soon() -> None:
    fleet = a_fleet()
    wanted = sequence(10 * PAGE)
    assert fleet.place(wanted, among=[1]).held_tokens == 0
    assert fleet.place(wanted, among=[0]).held_tokens == 10 * PAGE, "at another replica too"
    fleet.now_s = 100.0
    assert fleet.place(wanted, among=[2]).held_tokens == 0, "nobody has told of it: it came to nothing"


def test_held_tokens_are_unknown_if_any_holder_is_unknown() -> None:
    fleet = a_fleet()
    cold = sequence(10 * PAGE)
    fleet.follow(8, 1)
    assert fleet.place(cold, among=[1]).held_tokens == 0
    assert fleet.place(cold, among=[0]).held_tokens is None, "its kvstore is another, or was, in an earlier life"
    del fleet.view.lives["kvstore"]
    assert fleet.place(cold, among=[1]).held_tokens is None, "the stream broke"
    apart = Fleet("kv_aware")
    assert apart.place(cold).held_tokens is None, "they have no kvstore that could be watched"
    blind = Fleet("least_loaded")
    blind.follow(LIFE, 0, 1, 2)
    assert blind.place(cold).held_tokens is None, "no index"


def test_held_tokens_need_the_replicas_own_kvstore() -> None:
    fleet = a_fleet(4)
    fleet.view.lives["other"] = 8
    for index in (2, 3):
        fleet.measured(index, kvstore_boot_id=8)
    wanted = sequence(10 * PAGE)
    fleet.store(wanted)
    assert [fleet.place(wanted, among=[index]).held_tokens for index in range(4)] == [10 * PAGE] * 4
    del fleet.view.lives["other"]
    assert [fleet.place(wanted, among=[index]).held_tokens for index in range(4)] == [10 * PAGE] * 2 + [None] * 2


def test_held_tokens_distinguish_salts_groups_and_page_sizes() -> None:
    fleet = a_fleet(groups=2)
    fleet.store(sequence(10 * PAGE, cache_salt="a"))
    assert fleet.place(sequence(10 * PAGE, cache_salt="b")).held_tokens == 0
    assert fleet.place(sequence(10 * PAGE, cache_salt="a")).held_tokens == 10 * PAGE
    other = fleet.add("replica-3", of=model(groups=2, namespace=b"o" * 32))
    fleet.follow(LIFE, 3)
    assert fleet.place(sequence(10 * PAGE, cache_salt="a"), among=[3]).held_tokens == 0
    other.publish(accepts=True, model=model(groups=0, namespace=b"x" * 32))
    assert fleet.place(sequence(10 * PAGE), among=[3]).held_tokens is None, "it does not say how it names pages"


def test_prompt_without_a_full_page_has_no_held_tokens() -> None:
    fleet = a_fleet(1)
    fleet.store(sequence(10 * PAGE))
    assert fleet.place(sequence(PAGE - 1)).held_tokens == 0
    assert fleet.place(sequence(PAGE + 1)).held_tokens == PAGE


def test_held_tokens_are_absent_if_the_cache_is_skipped() -> None:
    assert a_fleet().place(sequence(10 * PAGE, skip_cache_read=True)).held_tokens is None
