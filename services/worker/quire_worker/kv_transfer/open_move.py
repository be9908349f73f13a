"""OpenMove: the state, on the engine's side, of a move that has not ended.

OpenMove copies no pages and sends no frames.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_common.credit import MoveKind
from quire_worker.engine.transfer_agent import POOL_FILLING, MoveResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit import PageMove


@dataclass(slots=True, eq=False)
class OpenMove:
    """A move that has not ended. Frames name it by `number`."""

    move: PageMove
    number: int
    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    wanted: deque[int] = field(default_factory=deque)
    """Pages that a store or an export has still to put into the ring."""
    offered: int = 0
    """An export may put this many pages into the ring, counted from the first one. A store may put all."""
    in_ring: int = 0
    """Pages of a load or pull that have come into the ring, in order. Fetched pages that count are included."""
    in_pool: int = 0
    """Pages of a load or pull that are in the pool. `in_ring` counts them too."""
    copies_in_flight: int = 0
    """Copies of its pages, either way, that have begun and not ended."""
    fetching: int = 0
    """Pages of a pull that the device is reading from the peer's memory."""
    fetched: int = 0
    """Pages of a pull, after those of `in_ring`, that the device has read. They count once their lease is known to have
    held."""
    ended: int | None = None
    """The number of whole pages, once nothing more of the move comes from the process; None before that."""
    cut: bool = False
    """The scheduler has ended it."""

    @property
    def fills_pool(self) -> bool:
        """Whether the move fills pages of the pool."""
        return self.move.kind in POOL_FILLING

    def offer(self, pages: int) -> None:
        """Note that the first `pages` pages of an export are filled."""
        self.offered = pages

    def record_arrival(self) -> None:
        """Count the next page as being in the ring."""
        self.in_ring += 1

    def begin_copy(self) -> None:
        """Count a copy of one of the move's pages, in either direction, as begun."""
        self.copies_in_flight += 1

    def finish_copy(self, *, to_ring: bool) -> None:
        """Count a copy as ended. If it went into the pool (not `to_ring`), its page counts as being in the pool."""
        self.copies_in_flight -= 1
        self.in_pool += not to_ring

    def begin_fetch(self, pages: int) -> None:
        """Note that the device is reading `pages` pages from the peer's memory."""
        self.fetching = pages

    def finish_fetch(self, pages: int) -> None:
        """Note that `pages` pages were read into the pool. They do not count yet."""
        self.fetching = 0
        self.fetched += pages

    def drop_fetch(self) -> None:
        """Forget the pages that the device was reading: they are lost."""
        self.fetching = 0

    def keep_fetched(self, pages: int) -> None:
        """Count `pages` of the fetched pages as being in the pool. The others are lost."""
        self.fetched = 0
        self.in_ring += pages
        self.in_pool += pages

    def cut_off(self, dropped: int) -> None:
        """End the move as failed, because the scheduler has ended it. No page is wanted any more, and `dropped` pages,
        which were taken back from the ring, no longer count as arrived."""
        self.cut, self.ended = True, 0
        self.wanted.clear()
        self.in_ring -= dropped

    def end(self, pages: int) -> None:
        """Note that the process has ended the move, and that `pages` of its pages are whole (at least 0, at most all).
        No page is wanted any more."""
        self.ended = max(0, min(pages, len(self.move.device_page)))
        self.wanted.clear()

    def lose_process(self) -> None:
        """Note that the process is gone. Only the pages in the pool count."""
        self.ended = self.in_ring = self.in_pool

    def add_wanted(self, indices: Sequence[int]) -> None:
        """Queue pages that the process asks for. Those of a store keep the order of the requests. Those of an export
        are sorted, without duplicates: a peer that connects again may ask last for the page that is filled next."""
        if self.move.kind == MoveKind.EXPORT:
            self.wanted = deque(sorted({*self.wanted, *indices}))
        else:
            self.wanted.extend(indices)

    def can_copy(self) -> bool:
        """Whether a page is wanted and the first wanted one may be put into the ring: of an export, only a page that
        has been offered."""
        return bool(self.wanted) and (self.move.kind != MoveKind.EXPORT or self.wanted[0] < self.offered)

    def is_finished(self) -> bool:
        """Whether the move is to be reported: it has ended, no copy or fetch is under way, and a load's or pull's pages
        in the ring have all reached the pool."""
        return (
            self.ended is not None
            and not self.copies_in_flight
            and not self.fetching
            and (not self.fills_pool or self.in_pool >= self.in_ring)
        )

    def result(self) -> MoveResult:
        """Return the result of a finished move, with its count of whole pages and the microseconds since it was
        submitted. Of a load or pull, only pages in the pool count; a store or export that the scheduler has ended has
        none. The result is ok if all pages are whole and the scheduler did not end the move."""
        pages = self.ended or 0
        if self.fills_pool:
            pages = self.in_pool if self.cut else min(pages, self.in_pool)
        ok = not self.cut and pages == len(self.move.device_page)
        us = (time.perf_counter_ns() - self.submitted_ns) // 1000
        return MoveResult(self.move.id, ok, pages, us)
