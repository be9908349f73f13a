"""Device pages of one KV group: who references them, and from when a freed one may be used again.

A freed page is fenced: steps that are still in flight may read or write it. It becomes free once the fence has passed:
the Grant that stopped its slot has retired, or the last step that could touch it has completed. Page 0 is the worker's
dummy and never granted. Knows nothing of requests, slots or what a page holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_scheduler.invariant import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


class Fence(NamedTuple):
    """What must have passed before pages are reused: a Grant's retirement and a step's completion."""

    grant: int = 0
    step: int = -1


NO_FENCE = Fence()


class PageAllocator:
    """Pages 1 .. num_pages - 1 with reference counts."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = max(num_pages - 1, 0)
        self._references = np.zeros(num_pages, np.int32)
        # A stack; the lowest page on top, so that small pools are easy to read in tests.
        self._free = list(range(num_pages - 1, 0, -1))
        self._fence_grant: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._fence_step: NDArray[np.int64] = np.full(num_pages, -1, np.int64)
        self._fenced: list[tuple[Fence, list[int]]] = []
        self._num_fenced = 0
        self._retired = 0
        self._completed = -1

    @property
    def free(self) -> int:
        """Pages that may be allocated now."""
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Pages without a reference that wait for their fence."""
        return self._num_fenced

    @property
    def referenced(self) -> int:
        """Pages that somebody references."""
        return self.capacity - self.free - self.fenced

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference. The caller has checked `free`."""
        require(0 <= count <= len(self._free), "more pages than are free")
        if not count:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        self._references[pages] = 1
        self._fence_grant[pages] = 0
        self._fence_step[pages] = -1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference for each; all have one already."""
        require(not pages or int(self._references[pages].min()) > 0, "retain of a free page")
        self._references[pages] += 1

    def release(self, pages: Sequence[int], fence: Fence = NO_FENCE) -> list[int]:
        """One reference less for each; returns those that nobody references any more, now fenced or free."""
        if not pages:
            return []
        require(int(self._references[pages].min()) > 0, "release of a free page")
        self._references[pages] -= 1
        np.maximum.at(self._fence_grant, pages, fence.grant)
        np.maximum.at(self._fence_step, pages, fence.step)
        gone = [page for page in pages if not self._references[page]]
        if gone:
            # A sharer that left earlier may have left a later fence behind.
            latest = Fence(int(self._fence_grant[gone].max()), int(self._fence_step[gone].max()))
            if self._passed(latest):
                self._free.extend(reversed(gone))
            else:
                self._fenced.append((latest, gone))
                self._num_fenced += len(gone)
        return gone

    def advance(self, retired: int, completed: int) -> None:
        """All steps before Grant `retired`, and all up to step `completed`, are done."""
        self._retired = max(self._retired, retired)
        self._completed = max(self._completed, completed)
        if self._fenced:
            still = []
            for fence, pages in self._fenced:
                if self._passed(fence):
                    self._free.extend(reversed(pages))
                    self._num_fenced -= len(pages)
                else:
                    still.append((fence, pages))
            self._fenced = still

    def references(self, page: int) -> int:
        """How many hold the page."""
        return int(self._references[page])

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Compare with all references that the callers know of; AssertionError on any difference."""
        expected = np.zeros_like(self._references)
        for pages in held:
            np.add.at(expected, list(pages), 1)
        wrong = np.nonzero(expected != self._references)[0]
        require(
            not len(wrong),
            f"pages {wrong[:8]} have {self._references[wrong[:8]]} references, not {expected[wrong[:8]]}",
        )
        require(not self._references[:1].any(), "page 0 was granted")
        fenced = [page for _, pages in self._fenced for page in pages]
        require(len(fenced) == self._num_fenced, "fenced pages were miscounted")
        loose = [*self._free, *fenced]
        require(len(loose) == len(set(loose)), "a page is free twice")
        require(0 not in loose, "page 0 is free")
        require(len(loose) + int((self._references > 0).sum()) == self.capacity, "a page is lost")

    def _passed(self, fence: Fence) -> bool:
        return fence.grant <= self._retired and fence.step <= self._completed
