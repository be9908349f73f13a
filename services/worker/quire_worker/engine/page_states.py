"""PageStates: for each page of the pool, how much of it is filled, which slot or move will fill it, and how many slots
hold it.

The ready watermark counts the filled positions of a page. With it, a sequence can wait for pages that another slot or a
move is still filling. PageStates does not know the contents of pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_worker.arrays import Int32

NOBODY = -1


class PageStates:
    """One entry per page in each column."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.ready = np.zeros(num_pages, np.int32)
        """The ready watermark: how many positions of the page, from its first, have their KV."""
        self.writer = np.full(num_pages, NOBODY, np.int32)
        """The slot that fills the page, or NOBODY."""
        self.pending = np.zeros(num_pages, np.bool_)
        """Whether a move will fill the page."""
        self.failed = np.zeros(num_pages, np.bool_)
        """Whether a move should have filled the page and did not."""
        self.refs = np.zeros(num_pages, np.int32)
        """Number of slots whose page tables hold the page."""
        self.running = np.zeros(num_pages, np.int32)
        """Number of running slots whose page tables hold the page: they read it."""
        self.exported = np.zeros(num_pages, np.int32)
        """Number of exports that offer the page: other workers read it."""
        self.busy_until = np.zeros(num_pages, np.int64)
        """The last step of a sequence that held the page and has left: until it ends, nobody may write the page."""
        self.setbacks = 0
        """The number of times that a page that is not full may have lost the slot or move that was to fill it."""

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool, the dummy page 0 included."""
        return len(self.ready)

    def claim(self, pages: Int32, slot: int | Int32) -> None:
        """Make a slot the writer of these pages, which count as empty and not failed from now on. `slot` is one slot
        for all pages, or an array with one slot for each page."""
        self.ready[pages] = 0
        self.failed[pages] = False
        self.writer[pages] = slot

    def release(self, pages: Int32, slot: int, *, running: bool) -> None:
        """Remove a slot that leaves from the holders, running holders (if it is `running`) and writers of its pages.
        The positions that it filled stay filled; no slot will fill the rest. If another slot holds such an unfinished
        page, `setbacks` rises."""
        self.refs[pages] -= 1
        if running:
            self.running[pages] -= 1
        mine = pages[self.writer[pages] == slot]
        self.writer[mine] = NOBODY
        held = mine[self.refs[mine] > 0]
        if len(held):
            self.setbacks += bool((self.ready[held] < self.page_size).any())

    def fill(self, pages: Int32, filled: Int32) -> None:
        """Raise the ready watermarks of pages to `filled` positions; a watermark never falls."""
        self.ready[pages] = np.maximum(self.ready[pages], filled)

    def expect(self, pages: Int32) -> None:
        """Mark pages as pending: they are empty, and a move will fill them."""
        self.ready[pages] = 0
        self.failed[pages] = False
        self.pending[pages] = True

    def arrived(self, pages: Int32, count: int, tail_tokens: int = 0) -> None:
        """Take in the end of a move: its first `count` pages are full, the others have failed, and none is pending any
        more. If all pages came and `tail_tokens` is not 0, only the first `tail_tokens` positions of the last page are
        filled. `setbacks` rises if pages failed, or `tail_tokens` is not 0."""
        self.pending[pages] = False
        self.ready[pages[:count]] = self.page_size
        if tail_tokens and count == len(pages):
            self.ready[pages[-1]] = tail_tokens
        self.failed[pages[count:]] = True
        self.setbacks += bool(tail_tokens or count < len(pages))

    def clear(self) -> None:
        """Reset all columns: no page is filled, held, awaited or exported. `setbacks` keeps its value."""
        self.ready.fill(0)
        self.writer.fill(NOBODY)
        self.pending.fill(False)
        self.failed.fill(False)
        self.refs.fill(0)
        self.running.fill(0)
        self.exported.fill(0)
        self.busy_until.fill(0)
