"""Pages: references, fences, and what integrity means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_scheduler.page_allocator import Fence, PageAllocator


def test_page_0_is_never_granted() -> None:
    pages = PageAllocator(5)
    assert sorted(pages.allocate(4)) == [1, 2, 3, 4]
    assert pages.free == 0
    with pytest.raises(AssertionError):
        pages.allocate(1)


def test_a_shared_page_stays_until_the_last_reference() -> None:
    pages = PageAllocator(5)
    held = pages.allocate(2)
    pages.retain(held[:1])
    assert pages.release(held) == held[1:]
    assert pages.references(held[0]) == 1
    assert (pages.free, pages.referenced) == (3, 1)
    pages.check_integrity([held[:1]])
    assert pages.release(held[:1]) == held[:1]
    with pytest.raises(AssertionError, match="release of a free page"):
        pages.release(held)


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


def test_an_earlier_sharers_later_fence_counts() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.retain(held)
    pages.release(held, Fence(grant=9))
    pages.release(held, Fence(grant=3))
    pages.advance(retired=8, completed=0)
    assert pages.free == 0
    pages.advance(retired=9, completed=0)
    assert pages.free == 1


@given(st.lists(st.tuples(st.sampled_from("arfd"), st.integers(0, 6)), max_size=60))
def test_no_page_is_lost(actions: list[tuple[str, int]]) -> None:
    pages, held, retired = PageAllocator(12), list[list[int]](), 0
    for action, n in actions:
        if action == "a" and n <= pages.free:
            held.append(pages.allocate(n))
        elif action == "r" and held:
            pages.retain(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif action == "f" and held:
            pages.release(held.pop(n % len(held)), Fence(grant=retired + n))
        elif action == "d":
            retired += n
            pages.advance(retired, 0)
        pages.check_integrity(held)
    for one in held:
        pages.release(one)
    pages.advance(retired + 10, 0)
    pages.check_integrity([])
    assert pages.free == pages.capacity == 11
