"""PageStates: how much of each page of the pool is filled, by whom it will be, and how many slots hold it.

The ready watermark is what lets a sequence start on pages that another slot or a move is still filling. Knows nothing
of what the pages hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire_worker.arrays import Int32

NOBODY = -1


class PageStates:
    """Columns by page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.ready = np.zeros(num_pages, np.int32)
        """Positions of the page, from its first, whose KV is there."""
        self.writer = np.full(num_pages, NOBODY, np.int32)
        """The slot that fills it, or NOBODY."""
        self.pending = np.zeros(num_pages, np.bool_)
        """A move will fill it."""
        self.failed = np.zeros(num_pages, np.bool_)
        """A move should have filled it and did not."""
        self.refs = np.zeros(num_pages, np.int32)
        """Slots whose tables hold it."""
        self.running = np.zeros(num_pages, np.int32)
        """Running slots whose tables hold it: they read it."""
        self.exported = np.zeros(num_pages, np.int32)
        """Exports that offer it: other workers read it."""
        self.busy_until = np.zeros(num_pages, np.int64)
        """The last step in flight of a sequence that held it and has left: until then nobody may write it."""
        self.setbacks = 0
        """How often a page that is not full may have lost the one who was to fill it."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the dummy page 0 included."""
        return len(self.ready)

    def claim(self, pages: Int32, slot: int | Int32) -> None:
        """Make a slot the writer of these pages, which count as empty from now on. `slot` is one slot, or one for each
        page."""
        self.ready[pages] = 0
        self.failed[pages] = False
        self.writer[pages] = slot

    def release(self, pages: Int32, slot: int, *, running: bool) -> None:
        """Remove a slot that leaves from its pages' holders and writers. The positions that it filled stay; nobody
        fills the rest, which is counted in `setbacks` if other slots hold such a page."""
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
        """Take in the end of a move: the first `count` pages are whole, the others failed, and none is pending. If all
        came and `tail_tokens` is not 0, the last page holds only so many tokens."""
        self.pending[pages] = False
        self.ready[pages[:count]] = self.page_size
        if tail_tokens and count == len(pages):
            self.ready[pages[-1]] = tail_tokens
        self.failed[pages[count:]] = True
        self.setbacks += bool(tail_tokens or count < len(pages))

    def clear(self) -> None:
        """Reset all columns: no page is filled, held, awaited or exported."""
        self.ready.fill(0)
        self.writer.fill(NOBODY)
        self.pending.fill(False)
        self.failed.fill(False)
        self.refs.fill(0)
        self.running.fill(0)
        self.exported.fill(0)
        self.busy_until.fill(0)
