"""PageIndex: a table from page keys to sets of holders. Its size is bounded: a page without room is not indexed, and
counted. Only one thread may use an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_router.pages.holder_sets import HolderSets
from quire_router.pages.page_table import PageTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from quire_router.pages.page_table import Keys, Slots

_SWEEP_SLOTS = 1 << 16


class PageIndex:
    """Holders are small numbers. `dropped` counts the pages for which there was no room."""

    def __init__(self, max_pages: int) -> None:
        self.dropped = 0
        self._table = PageTable(max_pages)
        self._sets = HolderSets()

    def __len__(self) -> int:
        return self._table.count

    @property
    def nbytes(self) -> int:
        """Return the memory of the table in bytes."""
        return self._table.nbytes

    @property
    def distinct_sets(self) -> int:
        """Return the number of distinct sets of holders that pages have."""
        return len(self._sets)

    def add(self, holder: int, keys: Keys, *, distinct: bool = False) -> int:
        """Add a holder's pages. Returns how many pages the holder has more than before. Pages without room are not
        added, and count in `dropped`. `distinct`: no key occurs twice."""
        slots = self._table.put(keys if distinct else np.unique(keys))
        if len(slots) and slots.min() < 0:
            self.dropped += int((slots < 0).sum())
            slots = slots[slots >= 0]
        return self._change(slots, add=1 << holder)

    def remove(self, holder: int, keys: Keys) -> int:
        """Remove a holder's pages. Returns how many of them the holder had."""
        slots = self._table.find(np.unique(keys))
        return self._change(slots[slots >= 0], remove=1 << holder)

    def sweep(self, holders: int) -> Iterator[None]:
        """Remove all holders of a bit mask from all pages, in steps of 65,536 slots. Between two steps other code may
        use the index, but must not add pages of these holders.

        An added page may move another page to a part that was swept already. So the sweep repeats until no page has
        these holders.
        """
        while True:
            for start in range(0, self._table.slots, _SWEEP_SLOTS):
                concerned = np.array([bool(mask & holders) for mask in self._sets.masks])
                values = self._table.values[start : start + _SWEEP_SLOTS]
                self._change(np.flatnonzero(concerned[values]) + start, remove=holders)
                yield
            if not self._sets.concern(holders):
                return

    def clear(self) -> None:
        """Forget everything."""
        self._table.clear()
        self._sets = HolderSets()

    def find(self, keys: Keys) -> NDArray[np.uint32]:
        """Return, for each page, the number of its set of holders (see `holders`); 0, the empty set, for a page that is
        not indexed."""
        return self._table.get(keys) if self._table.count else np.zeros(len(keys), np.uint32)

    def holders(self, number: int) -> int:
        """Return a set of holders, by number, as a bit mask. It includes holders that are still to be swept."""
        return self._sets.masks[number]

    def masks(self) -> Iterator[int]:
        """Yield the set of holders of each page as a bit mask, in no order."""
        return (self._sets.masks[number] for number in self._table.values.tolist() if number)

    def check_integrity(self) -> None:
        """Check the table and the sets, and that the sets count the table's pages. Raises AssertionError."""
        self._table.check_integrity()
        self._sets.check_integrity(self._table.values)

    def _change(self, slots: Slots, *, add: int = 0, remove: int = 0) -> int:
        """Add and remove the holders of two bit masks at these slots, and drop slots that have no holder then. Returns
        how many pages have another set."""
        if not len(slots):
            return 0
        numbers, changed = self._sets.change(self._table.values[slots], add=add, remove=remove)
        self._table.values[slots] = numbers
        gone = slots[numbers == 0]
        if len(gone):
            self._table.drop(gone)
        return changed
