"""The page table, holder sets and page directory behave like plain dictionaries."""

from __future__ import annotations

import functools
import hashlib
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from quire_router.pages.holder_sets import HolderSets
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_index import PageIndex
from quire_router.pages.page_keys import page_keys
from quire_router.pages.page_table import PageTable


def keys(*numbers: int) -> NDArray[np.uint64]:
    """Keys as uniform as those of hashes."""
    return np.array([key(number) for number in numbers], np.uint64)


@functools.cache
def key(number: int) -> int:
    return random.Random(number).getrandbits(64) or 1


def test_keys_differ_by_hash_namespace_and_group() -> None:
    hashes = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    pools = [(b"a" * 32, 0), (b"b" * 32, 0), (b"a" * 32, 1), (b"a" * 32, 2)]
    every = np.concatenate([page_keys(*pool, hashes) for pool in pools])
    assert len(set(every.tolist())) == 12 and every.dtype == np.uint64
    assert page_keys(b"a" * 32, 0, hashes[:2]).tolist() == every[:2].tolist()
    assert page_keys(bytes(32), 0, [bytes(32)]).tolist() == [1], "0 is no key"
    assert not len(page_keys(bytes(32), 0, []))


@pytest.mark.parametrize("seed", range(5))
def test_page_table_behaves_like_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    table, twin = PageTable(600), dict[int, int]()
    for number in range(1, 400):
        some = np.unique(keys(*(rng.randrange(900) for _ in range(rng.randrange(1, 40)))))
        if rng.random() < 0.6:
            slots = table.put(some)
            fits = slots >= 0
            assert fits.all() or len(twin) + len(some) > 600
            table.values[slots[fits]] = number
            twin |= dict.fromkeys(some[fits].tolist(), number)
        else:
            slots = table.find(some)
            assert ((slots >= 0) == [key in twin for key in some.tolist()]).all()
            table.drop(slots[slots >= 0])
            for key in some.tolist():
                twin.pop(key, None)
        assert table.get(some).tolist() == [twin.get(key, 0) for key in some.tolist()]
        table.check_integrity()
    assert table.count == len(twin) <= 600
    table.clear()
    table.check_integrity()
    assert not table.count


def test_page_table_holds_its_full_capacity() -> None:
    table = PageTable(6 << 12)
    many = np.unique(np.random.default_rng(1).integers(1, 1 << 63, 2 * table.capacity).astype(np.uint64))
    assert int((table.put(many) >= 0).sum()) == table.count == table.capacity
    table.check_integrity()


def test_equal_holder_sets_are_stored_once_and_freed() -> None:
    sets = HolderSets()
    numbers, changed = sets.change(np.zeros(5, np.uint32), add=0b01)
    assert changed == 5 and len(set(numbers.tolist())) == 1 and len(sets) == 1
    both, changed = sets.change(numbers[:2], add=0b10)
    assert changed == 2 and sets.masks[both[0]] == 0b11 and len(sets) == 2
    same, changed = sets.change(both, add=0b10)
    assert changed == 0 and same.tolist() == both.tolist()
    left, changed = sets.change(both, remove=0b11)
    assert changed == 2 and not left.any() and len(sets) == 1
    sets.check_integrity(numbers[2:])
    for mask in range(2, 300):
        one, _ = sets.change(np.zeros(1, np.uint32), add=mask)
        assert sets.masks[one[0]] == mask
    assert len(sets) == 299


def test_pages_without_room_are_counted_as_dropped() -> None:
    index = PageIndex(4)
    assert (index.add(0, keys(1, 2, 3, 3)), index.dropped) == (3, 0)
    assert (index.add(1, keys(2, 3, 4, 5, 6)), index.dropped) == (3, 2)
    assert len(index) == 4
    assert index.remove(0, keys(1, 2, 9)) == 2 and len(index) == 3
    index.check_integrity()


class Naive:
    """A directory as sets in dictionaries."""

    def __init__(self) -> None:
        self.reported: dict[int, set[int]] = {}
        self.expected: dict[int, dict[int, float]] = {}

    def depth(self, holder: int, chain: list[int], now: float, life: float) -> int:
        for depth, page in enumerate(chain):
            if page not in self.reported[holder] and self.expected[holder].get(page, -1e9) + life <= now:
                return depth
        return len(chain)


@pytest.mark.parametrize("seed", range(8))
def test_prefix_depths_match_a_naive_directory(seed: int) -> None:
    """Lives of expected pages are between one and two times `expected_s`: they are looked at where both agree."""
    rng = random.Random(seed)
    directory, naive, now = PageDirectory(1 << 16, 1.0), Naive(), 100.0
    for _ in range(300):
        act = rng.random()
        if act < 0.1 or not naive.reported:
            holder = directory.open()
            assert holder not in naive.reported
            naive.reported[holder], naive.expected[holder] = set(), {}
        elif act < 0.14:
            holder = rng.choice(list(naive.reported))
            directory.close(holder)
            del naive.reported[holder], naive.expected[holder]
        elif act < 0.18:
            for _ in directory.sweep():
                pass
            assert not directory.dirty
        else:
            holder = rng.choice(list(naive.reported))
            start = rng.randrange(4) * 1000
            pages = list(range(start, start + rng.randrange(1, 700)))
            if act < 0.5:
                directory.add(holder, keys(*pages))
                naive.reported[holder].update(pages)
            elif act < 0.65:
                gone = pages[rng.randrange(len(pages)) :]
                directory.remove(holder, keys(*gone))
                naive.reported[holder].difference_update(gone)
                for page in gone:
                    naive.expected[holder].pop(page, None)
            elif act < 0.8:
                directory.expect(holder, keys(*pages), now)
                naive.expected[holder].update(dict.fromkeys(pages, now))
            else:
                now += rng.choice([0.0, 0.01, 5.0])
                depths, told = directory.prefixes([keys(*pages)], now)
                for one in naive.reported:
                    least, most = (naive.depth(one, pages, now, life) for life in (1.0, 2.0))
                    assert least <= depths[one] <= most, (one, least, most, depths[one])
                    assert naive.reported[one].issuperset(pages[: min(told, depths[one])])
    directory.check_integrity()
    sizes = {holder: len(pages) for holder, pages in naive.reported.items()}
    assert {holder: directory.pages_of(holder) for holder in naive.reported} == sizes


def test_prefix_must_be_held_in_every_group_from_the_first_page() -> None:
    directory = PageDirectory(1000, 10.0)
    holder, other = directory.open(), directory.open()
    chain, second = keys(*range(10)), keys(*range(100, 110))
    directory.add(holder, chain)
    directory.add(holder, second[:4])
    directory.add(other, chain[1:])
    assert directory.prefixes([chain], 0.0).depths.tolist() == [10, 0]
    assert directory.prefixes([chain, second], 0.0).depths.tolist() == [4, 0]
    directory.expect(holder, second[4:6], 0.0)
    assert directory.prefixes([chain, second], 0.0).depths.tolist() == [6, 0]
    assert directory.prefixes([chain[:0]], 0.0).depths.tolist() == [0, 0]


def test_departed_holder_is_not_found_and_keeps_its_number_until_the_sweep() -> None:
    directory = PageDirectory(1 << 18, 10.0)
    gone, stays = directory.open(), directory.open()
    chain = keys(*range(50))
    directory.add(gone, chain)
    directory.add(stays, chain[:20])
    directory.expect(gone, keys(*range(50, 60)), 0.0)
    directory.close(gone)
    assert directory.prefixes([chain], 0.0).depths.tolist() == [0, 20]
    assert directory.open() == 2 and len(directory.reported) == 50
    steps = 0
    for _ in directory.sweep():
        steps += 1
        directory.add(stays, chain[:30])
    assert steps > 3 and len(directory.reported) == 30 and directory.expected == 0
    assert directory.open() == gone, "now it is free"
    assert directory.prefixes([chain], 0.0).depths.tolist() == [0, 30, 0]
    directory.check_integrity()


def test_page_moved_during_a_sweep_loses_its_departed_holder() -> None:
    """A full bucket that is swept last makes room by moving a page of who has left to one that was swept first."""
    directory = PageDirectory(90_000, 10.0)
    gone, stays = directory.open(), directory.open()
    low, high = 5, (1 << 14) - 5
    moves = np.array([low << 32 | high], np.uint64)
    directory.add(gone, moves)
    stuck = [np.array([number << 50 | high << 32 | high], np.uint64) for number in range(1, 9)]
    for key in stuck[:7]:
        directory.add(stays, key)
    directory.close(gone)
    sweep = directory.sweep()
    next(sweep)
    directory.add(stays, stuck[7])
    for _ in sweep:
        pass
    assert not directory.dirty and len(directory.reported) == 8
    assert directory.open() == gone
    assert directory.prefixes([moves], 0.0).depths.tolist() == [0, 0]
    directory.check_integrity()


def test_thousand_holders_share_few_holder_sets() -> None:
    directory = PageDirectory(1 << 12, 10.0)
    holders = [directory.open() for _ in range(1000)]
    chain = keys(*range(40))
    for holder in holders:
        directory.add(holder, chain[: 8 + holder % 3])
    assert directory.prefixes([chain], 0.0).depths.tolist() == [8 + holder % 3 for holder in holders]
    assert directory.reported.distinct_sets == 3


def test_page_is_held_while_reported_or_expected() -> None:
    directory = PageDirectory(1000, 10.0)
    first, second = directory.open(), directory.open()
    directory.add(first, keys(1))
    directory.expect(second, keys(2), 0.0)
    assert [directory.is_held(keys(number), 0.0) for number in (1, 2, 3)] == [True, True, False]
    assert not directory.is_held(keys(), 0.0)
    assert not directory.is_held(keys(2), 100.0), "it came to nothing"
    directory.close(first)
    assert not directory.is_held(keys(1), 0.0), "it has left, and is not swept out yet"


def test_expected_page_ends_after_twice_its_time_however_lookups_fall() -> None:
    directory = PageDirectory(1000, 1.0)
    holder = directory.open()
    directory.expect(holder, keys(1), 0.01)
    found = [directory.is_held(keys(1), now_s) for now_s in (0.99, 1.98, 2.97)]
    assert found == [True, True, False]
    directory.expect(holder, keys(2), 3.9)
    assert [directory.is_held(keys(2), now_s) for now_s in (4.89, 4.91, 5.91)] == [True, True, False]
