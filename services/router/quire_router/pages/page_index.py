"""Which holders have which pages: a table from page keys to sets of holders. Bounded: what finds no room is not
indexed, and counted. One thread's.
"""

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
    """Holders are small numbers. `dropped` counts pages for which there was no room."""

    def __init__(self, max_pages: int) -> None:
        self.dropped = 0
        self._table = PageTable(max_pages)
        self._sets = HolderSets()

    def __len__(self) -> int:
        return self._table.count

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    @property
    def distinct_sets(self) -> int:
        """Sets of holders that some page has."""
        return len(self._sets)

    def add(self, holder: int, keys: Keys, *, distinct: bool = False) -> int:
        """A holder has these pages, or has them still; returns how many are new for it."""
        slots = self._table.put(keys if distinct else np.unique(keys))
        if len(slots) and slots.min() < 0:
            self.dropped += int((slots < 0).sum())
            slots = slots[slots >= 0]
        return self._change(slots, add=1 << holder)

    def remove(self, holder: int, keys: Keys) -> int:
        """A holder has these pages no more; returns how many it had."""
        slots = self._table.find(np.unique(keys))
        return self._change(slots[slots >= 0], remove=1 << holder)

    def sweep(self, holders: int) -> Iterator[None]:
        """Forget all holders of a mask, in steps; whoever adds no pages of these may use the index meanwhile.

        What is added may move a page to where has been swept already: so again, until there is none.
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
        """For each page a number that stands for the set of its holders: see `holders`."""
        return self._table.get(keys) if self._table.count else np.zeros(len(keys), np.uint32)

    def holders(self, number: int) -> int:
        """The set as a mask; those who are to be swept included."""
        return self._sets.masks[number]

    def masks(self) -> Iterator[int]:
        """The set of holders of each page, in no order."""
        return (self._sets.masks[number] for number in self._table.values.tolist() if number)

    def check_integrity(self) -> None:
        """Table and sets agree; AssertionError otherwise."""
        self._table.check_integrity()
        self._sets.check_integrity(self._table.values)

    def _change(self, slots: Slots, *, add: int = 0, remove: int = 0) -> int:
        if not len(slots):
            return 0
        numbers, changed = self._sets.change(self._table.values[slots], add=add, remove=remove)
        self._table.values[slots] = numbers
        gone = slots[numbers == 0]
        if len(gone):
            self._table.drop(gone)
        return changed
