"""Which page goes first, by policy; and that ARC earns its name."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from quire_common.errors import ConfigError
from quire_common.pages import PageKey
from quire_kvstore.eviction import POLICIES, EvictionPolicy, make_policy
from tests.unit.kvstore.pages import chain

KEYS = chain("k", 400).keys()


def drained(policy: EvictionPolicy) -> list[int]:
    order = []
    while (key := policy.evict()) is not None:
        order.append(KEYS.index(key))
    return order


def filled(name: str, count: int = 6, capacity: int = 6) -> EvictionPolicy:
    policy = make_policy(name, capacity)
    for key in KEYS[:count]:
        policy.add(key, 1)
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_what_both_promise(name: str) -> None:
    policy = filled(name)
    policy.hold(KEYS[0])
    policy.discard(KEYS[1])
    policy.refresh(KEYS[2])
    policy.use(KEYS[3])
    policy.use(KEYS[0])
    assert policy.evict(spared={KEYS[4]}) == KEYS[5], "held, spared and used pages stay"
    assert set(policy) == {KEYS[2], KEYS[3], KEYS[4]}
    policy.release(KEYS[0])
    assert drained(policy) == [4, 2, 3, 0]
    assert policy.evict() is None
    policy.add(KEYS[7], 1, held=True)
    assert policy.evict() is None
    policy.discard(KEYS[7])
    with pytest.raises(KeyError):
        policy.release(KEYS[7])


def test_a_policy_that_is_none_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="lfu") as caught:
        make_policy("lfu", 1)
    assert "lru, arc" in caught.value.fix


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    kept = {}
    for name in POLICIES:
        policy = filled(name, 3)
        for key in KEYS[:3]:
            policy.use(key)
        for key in KEYS[10:60]:
            if len(list(policy)) == 6:
                policy.evict()
            policy.add(key, 1)
        kept[name] = len(set(policy) & set(KEYS[:3]))
    assert kept == {"lru": 0, "arc": 3}


def test_arc_remembers_what_it_evicted_too_early() -> None:
    policy = filled("arc", 6)
    assert policy.evict() == KEYS[0]
    policy.add(KEYS[0], 1)
    policy.add(KEYS[8], 1)
    assert policy.evict() == KEYS[1], "the page that came back counts as used twice"


def test_a_page_that_comes_held_has_been_used_once() -> None:
    policy = make_policy("arc", 4)
    policy.add(KEYS[0], 1, held=True)
    policy.add(KEYS[1], 1)
    policy.use(KEYS[1])
    policy.release(KEYS[0])
    assert drained(policy) == [0, 1]


def hit_rate(name: str, accesses: list[PageKey], capacity: int) -> float:
    policy, here, hits = make_policy(name, capacity), set[PageKey](), 0
    for key in accesses:
        if key in here:
            hits += 1
            policy.use(key)
            continue
        if len(here) == capacity:
            victim = policy.evict()
            assert victim is not None
            here.remove(victim)
        here.add(key)
        policy.add(key, 1)
    return hits / len(accesses)


def test_arc_beats_lru_where_scans_pass_and_is_near_it_elsewhere() -> None:
    chance = random.Random(1)
    hot = [chance.choice(KEYS[:30]) for _ in range(4000)]
    scans = [key for index, key in enumerate(hot) for key in (key, KEYS[40 + index % 360])]
    assert hit_rate("arc", scans, 40) > hit_rate("lru", scans, 40) + 0.05
    shifting = [KEYS[min(399, step // 40 + chance.randrange(30))] for step in range(8000)]
    assert hit_rate("arc", shifting, 40) > hit_rate("lru", shifting, 40) - 0.05


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_of_all_kinds_and_ghosts_within_bounds(name: str) -> None:
    chance = random.Random(2)
    policy, sizes = make_policy(name, 1000), dict[PageKey, int]()
    for _ in range(5000):
        key = chance.choice(KEYS)
        if key in sizes:
            policy.use(key)
        else:
            size = chance.choice([10, 50, 200])
            while sum(sizes.values()) + size > 1000:
                victim = policy.evict()
                assert victim is not None
                del sizes[victim]
            policy.add(key, size)
            sizes[key] = size
        assert set(policy) == set(sizes)
    ghosts = [getattr(policy, attribute) for attribute in ("_recent_ghosts", "_frequent_ghosts") if name == "arc"]
    assert all(queue.total_bytes == sum(queue.values()) <= 1000 for queue in ghosts)
    assert all(not set(a) & set(b) for a, b in pairwise([*ghosts, sizes]))
