"""Pages: references, fences, and what integrity means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_scheduler.kv.page_allocator import Fence, PageAllocator


def test_page_0_is_never_granted() -> None:
    pages = PageAllocator(5)
    assert sorted(pages.allocate(4)) == [1, 2, 3, 4]
    assert pages.free == 0
    with pytest.raises(AssertionError):
        pages.allocate(1)


def test_a_shared_page_stays_until_the_last_reference() -> None:
    pages = PageAllocator(5)
    held = pages.allocate(2)
    pages.share(held[:1])
    pages.release(held)
    assert pages.references(held[0]) == 1
    assert (pages.free, pages.referenced) == (3, 1)
    pages.check_integrity([held[:1]])
    pages.release(held[:1])
    with pytest.raises(AssertionError, match="release of a free page"):
        pages.release(held)


def test_a_page_is_released_once_in_a_call() -> None:
    pages = PageAllocator(5)
    held = pages.allocate(2)
    with pytest.raises(AssertionError, match="release of a page twice"):
        pages.release([held[0], held[1], held[0]])
    pages.check_integrity([held])
    assert pages.free == 2


def test_a_grant_fence_holds_until_it_has_retired() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    pages.release(held, Fence(grant=7))
    assert (pages.free, pages.fenced, pages.referenced) == (0, 2, 0)
    pages.advance(retired=6, completed=100)
    assert pages.free == 0
    pages.advance(retired=7, completed=100)
    assert (pages.free, pages.fenced) == (2, 0)


def test_a_step_fence_holds_until_it_has_completed() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(1)
    pages.release(held, Fence(step=12))
    pages.advance(retired=99, completed=11)
    assert pages.free == 1
    pages.advance(retired=0, completed=12)
    assert pages.free == 2
    pages.release(pages.allocate(1), Fence(step=12))
    assert pages.free == 2, "a fence that has passed holds nothing"


def test_latest_fence_of_all_sharers_counts() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.share(held)
    pages.release(held, Fence(grant=9))
    pages.release(held, Fence(grant=3))
    pages.advance(retired=8, completed=0)
    assert pages.free == 0
    pages.advance(retired=9, completed=0)
    assert pages.free == 1


def kept(pages: PageAllocator, count: int) -> list[int]:
    held = pages.allocate(count)
    pages.keep(held)
    return held


def test_named_pages_are_evicted_last_and_tails_first() -> None:
    gone: list[int] = []
    pages = PageAllocator(9, gone.extend)
    first, second = kept(pages, 3), kept(pages, 3)
    pages.release(first)
    pages.release(second)
    assert (pages.free, pages.idle, pages.referenced) == (8, 6, 0)
    assert not set(pages.allocate(2)) & {*first, *second} and not gone, "free ones before kept ones"
    assert pages.allocate(4) == [*reversed(first), second[2]]
    assert gone == [*reversed(first), second[2]] and pages.idle == 2
    pages.share(second[:2])
    assert pages.free == 0


def test_reused_prefix_is_evicted_later() -> None:
    pages = PageAllocator(7)
    first, second = kept(pages, 3), kept(pages, 3)
    pages.release(first)
    pages.release(second)
    pages.share(first[:2])
    pages.release(first[:2])
    assert pages.allocate(6) == [first[2], *reversed(second), first[1], first[0]]


def test_a_kept_page_is_evicted_only_behind_its_fence() -> None:
    pages = PageAllocator(3)
    held = kept(pages, 2)
    pages.release(held, Fence(grant=4))
    assert (pages.free, pages.fenced) == (0, 2)
    pages.advance(4, 0)
    assert (pages.free, pages.idle) == (2, 2)


def test_shared_fenced_page_stays_held_when_the_fence_passes() -> None:
    pages = PageAllocator(3)
    held = kept(pages, 2)
    pages.release(held, Fence(grant=4))
    pages.share(held[:1])
    pages.check_integrity([held[:1]])
    pages.advance(4, 0)
    pages.check_integrity([held[:1]])
    assert (pages.free, pages.referenced) == (1, 1)
    pages.release(held[:1], Fence(grant=9))
    pages.share(held[:1])
    pages.release(held[:1], Fence(grant=7))
    pages.advance(8, 0)
    assert pages.free == 1, "the later of its fences counts"
    pages.check_integrity([])
    pages.advance(9, 0)
    assert pages.free == 2


def test_dropped_page_is_free_like_any_other() -> None:
    pages = PageAllocator(4)
    held = kept(pages, 3)
    pages.release(held[:1])
    pages.release(held[1:2], Fence(grant=3))
    pages.drop(held)
    assert (pages.free, pages.idle, pages.fenced) == (1, 0, 1)
    pages.advance(3, 0)
    pages.release(held[2:])
    assert (pages.free, pages.idle) == (3, 0)
    with pytest.raises(AssertionError, match="share of a free page"):
        pages.share(held[:1])


@given(st.lists(st.tuples(st.sampled_from("arfdkuo"), st.integers(0, 6)), max_size=80))
def test_random_use_loses_no_page(actions: list[tuple[str, int]]) -> None:
    pages, held, retired = PageAllocator(12), list[list[int]](), 0
    for action, n in actions:
        if action == "a" and n <= pages.free:
            held.append(pages.allocate(n))
        elif action == "r" and held:
            pages.share(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif action == "f" and held:
            pages.release(held.pop(n % len(held)), Fence(grant=retired + n))
        elif action == "k" and held:
            pages.keep(held[n % len(held)])
        elif action == "u" and (kept_pages := sorted(pages.kept())):
            page = kept_pages[n % len(kept_pages)]
            pages.share([page])
            held.append([page])
        elif action == "o" and (kept_pages := sorted(pages.kept())):
            pages.drop([kept_pages[n % len(kept_pages)]])
        elif action == "d":
            retired += n
            pages.advance(retired, 0)
        pages.check_integrity(held)
    for one in held:
        pages.release(one)
    pages.advance(retired + 10, 0)
    pages.check_integrity([])
    assert pages.free == pages.capacity == 11


def test_lent_page_is_not_allocated_until_returned() -> None:
    gone: list[int] = []
    pages = PageAllocator(5, gone.extend)
    table = pages.allocate(3)
    pages.keep(table)
    pages.lend(table)
    pages.release(table)
    assert (pages.free, pages.idle, pages.fenced, pages.awaited, pages.referenced) == (1, 0, 3, 3, 0)
    pages.check_integrity([], [table])
    pages.share(table[:1])
    assert (pages.awaited, pages.referenced) == (2, 1)
    pages.take_back(table)
    assert (pages.free, pages.idle, pages.awaited) == (3, 2, 0)
    pages.release(table[:1])
    pages.check_integrity([], [])
    assert len(pages.allocate(4)) == 4 and gone == [table[2], table[1], table[0]], "its tail goes first"


def test_returned_page_keeps_its_place_in_eviction_order() -> None:
    gone: list[int] = []
    pages = PageAllocator(7, gone.extend)
    old, new = pages.allocate(3), pages.allocate(3)
    for table in (old, new):
        pages.keep(table)
        pages.release(table)
    assert pages.next_evicted(4) == [*reversed(old), new[2]] and pages.next_evicted(0) == []
    pages.lend(old[1:])
    assert pages.next_evicted(2) == [old[0], new[2]], "what is being stored is not looked at again"
    pages.take_back(old[1:])
    assert pages.next_evicted(6) == [*reversed(old[1:]), old[0], *reversed(new)]
    pages.check_integrity([])


def test_lent_page_waits_for_its_fence_and_every_move() -> None:
    pages = PageAllocator(3)
    table = pages.allocate(2)
    pages.lend(table)
    pages.lend(table[:1])
    pages.release(table, Fence(grant=5))
    pages.take_back(table)
    assert (pages.free, pages.fenced, pages.awaited) == (0, 2, 0)
    pages.advance(5, 0)
    assert (pages.free, pages.fenced, pages.awaited) == (1, 1, 1)
    pages.check_integrity([], [table[:1]])
    with pytest.raises(AssertionError, match="lent pages"):
        pages.check_integrity([], [])
    pages.take_back(table[:1])
    assert pages.free == 2
    pages.check_integrity([])
