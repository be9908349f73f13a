"""PagePools: the page allocators of all KV groups. A sequence has the same number of pages in each group. Before idle
pages are used for other content, `evicted` is called with their group and their numbers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire_scheduler.kv.page_allocator import NO_FENCE, Fence, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quire_scheduler.core.request import Request


class PagePools:
    """One PageAllocator per KV group."""

    def __init__(
        self, page_size: int, num_pages: Sequence[int], evicted: Callable[[int, Sequence[int]], object]
    ) -> None:
        self.page_size = page_size
        self.pools = tuple(PageAllocator(count, partial(evicted, group)) for group, count in enumerate(num_pages))

    @property
    def groups(self) -> int:
        """The number of KV groups."""
        return len(self.pools)

    @property
    def capacity(self) -> int:
        """The most pages per group that one sequence could have."""
        return min(pool.capacity for pool in self.pools)

    @property
    def free(self) -> int:
        """Pages that may be allocated now in every group."""
        return min(pool.free for pool in self.pools)

    @property
    def coming(self) -> int:
        """Pages per group that are free, or will be when fences have passed and moves have ended."""
        return min(pool.free + pool.fenced for pool in self.pools)

    @property
    def coming_by_steps(self) -> int:
        """Pages per group that are free, or will be when fences have passed. Pages that wait for the end of a move are
        left out."""
        return min(pool.free + pool.fenced - pool.awaited for pool in self.pools)

    def pages_for(self, positions: int) -> int:
        """Return how many pages cover `positions` positions."""
        return -(-positions // self.page_size)

    def free_beside(self, tables: Sequence[Sequence[int]]) -> int:
        """Return how many pages may be allocated in every group after the pages of these tables have been shared."""
        return min(pool.free - pool.idle_among(table) for pool, table in zip(self.pools, tables, strict=True))

    def share(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Begin the request's tables with these pages, which hold, or will hold, the beginning of its sequence."""
        request.hold_pages(tuple(list(table) for table in tables))
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(table)

    def give(self, request: Request, count: int) -> None:
        """Append `count` pages per group to the request's tables. The caller has checked `free`."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            table += pool.allocate(count)

    def give_each(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Allocate `counts[i]` pages in every group for the i-th request, and append them to its tables. Returns the
        new pages by group, in the order of the requests."""
        given = [pool.allocate(sum(counts)) for pool in self.pools]
        for group, pages in enumerate(given):
            at = 0
            for request, count in zip(requests, counts, strict=True):
                request.tables[group].extend(pages[at : at + count])
                at += count
        return given

    def take_back(self, request: Request, fence: Fence) -> None:
        """Drop all of the request's references to pages; the pages may be reused once `fence` has passed."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.release(table, fence)
        request.give_up_pages()

    def retain(self, group: int, pages: Sequence[int]) -> None:
        """Add one reference to each of these pages."""
        self.pools[group].share(pages)

    def release(self, group: int, pages: Sequence[int], fence: Fence = NO_FENCE) -> None:
        """Drop one reference to each of these pages."""
        self.pools[group].release(pages, fence)

    def lend(self, group: int, pages: Sequence[int]) -> None:
        """Lend these pages to a move that reads them."""
        self.pools[group].lend(pages)

    def returned(self, group: int, pages: Sequence[int]) -> None:
        """End the loan of these pages to a move."""
        self.pools[group].take_back(pages)

    def freed_by(self, request: Request, *, lent: bool = True) -> int:
        """Return how many pages in every group would have no reference if the request gave up its own. Pages that a
        move reads are counted only with `lent`."""
        return min(
            sum(pool.references(page) == 1 and (lent or not pool.is_lent(page)) for page in table)
            for pool, table in zip(self.pools, request.tables, strict=True)
        )

    def unheld(self, tables: Sequence[Sequence[int]]) -> int:
        """Return how many of these pages, which moves read, have no reference and so become free when the moves end:
        the largest number of any KV group."""
        return max(
            sum(pool.references(page) == 0 for page in table) for pool, table in zip(self.pools, tables, strict=True)
        )

    def advance(self, retired: int, completed: int) -> None:
        for pool in self.pools:
            pool.advance(retired, completed)

    def check_integrity(
        self,
        requests: Iterable[Request],
        written: Iterable[tuple[int, Sequence[int]]],
        read: Iterable[tuple[int, Sequence[int]]],
    ) -> None:
        """Raise AssertionError unless references and loans are as expected. The references must be those of the
        requests' tables and of the moves that write (`written`). The loans must be those of the moves that read
        (`read`). Both arguments have one (group, pages) for each move."""
        requests, written, read = list(requests), list(written), list(read)
        for group, pool in enumerate(self.pools):
            held = [request.tables[group] for request in requests if request.tables]
            filled, lent = ([pages for g, pages in moves if g == group] for moves in (written, read))
            pool.check_integrity([*held, *filled], lent)
