"""PageAllocator: reference counts and states of the device pages of one KV group.

A page in use has references. A page without a reference is in one of four states:

  fenced   it was released, but steps in flight may still read or write it
  free     it may be allocated
  idle     its content is kept for reuse: `share` takes it again, or it is evicted when no free page is left
  awaited  only a move that still reads it keeps it from being free or idle

A fence names a Grant, a step, or both. It passes when the Grant, which stopped the page's slot, has retired, and the
step, the last one that could touch the page, has completed. Then the page becomes idle if its content is kept, else
free. The idle page that was released longest ago is evicted first. A move is a copy of pages that the worker carries
out. A page is lent to a move that reads it, and is not allocated anew until the move has ended. Page 0 is the worker's
dummy and is never granted.

The allocator knows nothing of requests, slots or the content of pages.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray


class Fence(NamedTuple):
    """The condition for reusing pages: Grant `grant` must have retired, and step `step` must have completed."""

    grant: int = 0
    step: int = -1


class _Fenced(NamedTuple):
    fence: Fence
    batch: int
    pages: NDArray[np.intp]


NO_FENCE = Fence()


class PageAllocator:
    """Pages 1 .. num_pages - 1 with reference counts. The allocator calls `evicted` with the idle pages whose content
    it is about to give up."""

    def __init__(self, num_pages: int, evicted: Callable[[list[int]], object] = lambda pages: None) -> None:
        self.capacity = max(num_pages - 1, 0)
        self._references = np.zeros(num_pages, np.int32)
        # A stack; the lowest page on top, so that small pools are easy to read in tests.
        self._free = list(range(num_pages - 1, 0, -1))
        self._kept: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        # Kept pages without a reference whose fence has passed, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted = evicted
        self._fence_grant: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._fence_step: NDArray[np.int64] = np.full(num_pages, -1, np.int64)
        # The number of the batch in which the page was released and waits for its fence; 0: the page does not wait.
        self._batch: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._fenced: list[_Fenced] = []
        self._batches = 0
        self._num_fenced = 0
        # `_lent`: how many moves read each lent page. `_awaited`: lent pages without a reference whose fence has
        # passed; the value says whether the page was idle when it was lent, so that it is among the next to be evicted.
        self._lent: dict[int, int] = {}
        self._awaited: dict[int, bool] = {}
        self.allocated = 0
        self._retired = 0
        self._completed = -1

    @property
    def free(self) -> int:
        """Pages that may be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Free pages whose content is still kept."""
        return len(self._idle)

    @property
    def fenced(self) -> int:
        """Pages without a reference that wait for their fence, or for the end of a move."""
        return self._num_fenced + len(self._awaited)

    @property
    def awaited(self) -> int:
        """Pages without a reference that wait only for the end of a move."""
        return len(self._awaited)

    @property
    def referenced(self) -> int:
        """Pages that somebody references."""
        return self.capacity - self.free - self.fenced

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each. Free pages are used first, then idle ones are evicted. The
        caller has checked `free`; AssertionError otherwise."""
        require(0 <= count <= self.free, "more pages than are free")
        if not count:
            return []
        left = max(len(self._free) - count, 0)
        pages = self._free[left:][::-1]
        del self._free[left:]
        if len(pages) < count:
            pages += self._evict(count - len(pages))
        self.allocated += count
        at = np.array(pages)
        self._references[at] = 1
        self._fence_grant[at] = 0
        self._fence_step[at] = -1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page. A page without a reference must be one whose content is kept (AssertionError
        otherwise); it stops being idle, fenced or awaited."""
        if not len(pages):
            return
        references = self._references[pages]
        if not int(references.min()):
            for page in np.asarray(pages)[references == 0].tolist():
                require(bool(self._kept[page]), "share of a free page")
                if self._batch[page]:
                    self._batch[page] = 0
                    self._num_fenced -= 1
                elif page in self._awaited:
                    del self._awaited[page]
                else:
                    del self._idle[page]
        self._references[pages] += 1

    def release(self, pages: Sequence[int], fence: Fence = NO_FENCE) -> None:
        """Drop one reference to each page, which must have one and be named once (AssertionError otherwise). When this
        fence and those of earlier releases have passed, pages without a reference become idle if their content is kept,
        else free; a page that a move reads waits for the end of the move too. Of these idle pages, the last one in the
        list is evicted first. A page that waits is not allocated, but `share` takes it back if its content is kept."""
        if not pages:
            return
        require(len(set(pages)) == len(pages), "release of a page twice")
        at = np.array(pages)
        left = self._references[at] - 1
        require(int(left.min()) >= 0, "release of a free page")
        self._references[at] = left
        if not self._passed(fence):
            self._fence_grant[at] = np.maximum(self._fence_grant[at], fence.grant)
            self._fence_step[at] = np.maximum(self._fence_step[at], fence.step)
        gone = at[left == 0]
        if len(gone):
            # A sharer that left earlier may have left a later fence behind.
            latest = Fence(int(self._fence_grant[gone].max()), int(self._fence_step[gone].max()))
            if self._passed(latest):
                self._settle(gone)
            else:
                self._batches += 1
                self._batch[gone] = self._batches
                self._fenced.append(_Fenced(latest, self._batches, gone))
                self._num_fenced += len(gone)

    def lend(self, pages: Sequence[int]) -> None:
        """Lend these pages, which are referenced or idle, to a move that reads them. They are not allocated anew until
        `take_back`."""
        for page in pages:
            self._lent[page] = self._lent.get(page, 0) + 1
            if page in self._idle:
                del self._idle[page]
                self._awaited[page] = True

    def take_back(self, pages: Sequence[int]) -> None:
        """End the loan of these pages to one move. A page that is lent to no other move, has no reference and waits for
        no fence becomes idle if its content is kept, else free. Pages that were idle when they were lent are the next
        to be evicted, the last of the list first."""
        front = list[int]()
        for page in reversed(pages):
            left = self._lent[page] - 1
            if left:
                self._lent[page] = left
                continue
            del self._lent[page]
            old = self._awaited.pop(page, None)
            if old is None:
                continue
            if not self._kept[page]:
                self._free.append(page)
            elif old:
                front.append(page)
            else:
                self._idle[page] = None
        for page in reversed(front):
            self._idle[page] = None
            self._idle.move_to_end(page, last=False)

    def next_evicted(self, most: int) -> list[int]:
        """Return the idle pages that the allocator evicts if `most` more pages are allocated, in the order of
        eviction."""
        return list(islice(self._idle, max(most - len(self._free), 0)))

    def keep(self, pages: Sequence[int]) -> None:
        """Keep the content of these pages when nobody references them any more, until they are evicted."""
        self._kept[pages] = True

    def drop(self, pages: Sequence[int]) -> None:
        """Stop keeping the content of these pages; idle ones become free."""
        self._kept[pages] = False
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def advance(self, retired: int, completed: int) -> None:
        """Note that Grant `retired` has retired and step `completed` has completed, with all before them. Pages whose
        fence has passed become idle if their content is kept, else free; a page that a move still reads is awaited."""
        self._retired = max(self._retired, retired)
        self._completed = max(self._completed, completed)
        if self._fenced:
            still = []
            for fenced in self._fenced:
                if self._passed(fenced.fence):
                    # A page that was shared meanwhile waits no longer, or it was released again and waits with a later
                    # batch.
                    waiting = fenced.pages[self._batch[fenced.pages] == fenced.batch]
                    self._batch[waiting] = 0
                    self._num_fenced -= len(waiting)
                    self._settle(waiting)
                else:
                    still.append(fenced)
            self._fenced = still

    def references(self, page: int) -> int:
        """Return the number of references to the page."""
        return int(self._references[page])

    def is_lent(self, page: int) -> bool:
        """Whether a move reads the page."""
        return page in self._lent

    def idle_among(self, pages: Iterable[int]) -> int:
        """Return how many of the pages are idle. Sharing the pages leaves that many fewer to allocate."""
        return sum(map(self._idle.__contains__, pages))

    def kept(self) -> set[int]:
        """Return the pages whose content is kept, referenced ones included."""
        return set(np.flatnonzero(self._kept).tolist())

    def check_integrity(self, held: Iterable[Sequence[int]], lent: Iterable[Sequence[int]] = ()) -> None:
        """Compare with all references (`held`: the page tables, and pages that moves write) and loans (`lent`: pages
        that moves read) that the callers know of. Raises AssertionError on any difference, if page 0 was granted,
        and if the states of pages contradict each other: a page is lost or in two states, or its content is kept
        though it is free, or not kept though it is idle."""
        expected = np.zeros_like(self._references)
        for pages in held:
            np.add.at(expected, list(pages), 1)
        wrong = np.nonzero(expected != self._references)[0]
        require(
            not len(wrong),
            f"pages {wrong[:8]} have {self._references[wrong[:8]]} references, not {expected[wrong[:8]]}",
        )
        require(not self._references[:1].any() and not self._kept[:1].any(), "page 0 was granted")
        fenced = [page for _, batch, pages in self._fenced for page in pages.tolist() if self._batch[page] == batch]
        require(len(fenced) == self._num_fenced == int((self._batch > 0).sum()), "fenced pages were miscounted")
        require(Counter(page for pages in lent for page in pages) == Counter(self._lent), "lent pages were miscounted")
        require(self._awaited.keys() <= self._lent.keys(), "a page waits for a move that has ended")
        require(self._lent.keys().isdisjoint([*self._free, *self._idle]), "a lent page is free")
        loose = [*self._free, *self._idle, *self._awaited, *fenced]
        require(len(loose) == len(set(loose)), "a page is free twice")
        require(0 not in loose, "page 0 is free")
        require(not (self._references[loose] > 0).any(), "a page is free and referenced")
        require(len(loose) + int((self._references > 0).sum()) == self.capacity, "a page is lost")
        require(not self._kept[self._free].any(), "a page is kept and free")
        require(bool(self._kept[list(self._idle)].all()), "a page is idle for nothing")

    def _settle(self, pages: NDArray[np.intp]) -> None:
        """Make these pages, whose fence has passed, idle if their content is kept, else free. A page that a move still
        reads waits for the end of the move."""
        last_first = pages[::-1]
        numbers, kept_flags = last_first.tolist(), self._kept[last_first].tolist()
        if not self._lent and not any(kept_flags):
            self._free += numbers
            return
        for page, kept in zip(numbers, kept_flags, strict=True):
            if page in self._lent:
                self._awaited[page] = False
            elif kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _evict(self, count: int) -> list[int]:
        """Take the `count` idle pages that were released longest ago, stop keeping their content, and call `evicted`
        with them. Returns the pages."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self._kept[pages] = False
        self._evicted(pages)
        return pages

    def _passed(self, fence: Fence) -> bool:
        return fence.grant <= self._retired and fence.step <= self._completed
