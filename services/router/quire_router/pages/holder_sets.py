"""HolderSets: sets of holders, each distinct set stored once. Most pages have one of few sets, so a page stores only
the number of its set.

A set is a bit mask in an integer, with a bit per holder. Sets that no page has are forgotten, and their numbers are
used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.uint32]


class HolderSets:
    """Number 0 is the empty set. `masks` has the sets by number."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._pages: NDArray[np.int64] = np.zeros(64, np.int64)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers) - 1

    def change(self, numbers: Numbers, *, add: int = 0, remove: int = 0) -> tuple[Numbers, int]:
        """Add and remove the holders of two bit masks in the sets of many pages. `numbers` has the number of each
        page's present set, for one page at least; a holder in both masks is removed. Returns the new number of each
        page's set, and how many pages have another set. Sets that no page has any more are forgotten."""
        # Pages of a chain have the same holders for long stretches.
        starts = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
        lengths = np.diff(starts, append=len(numbers))
        if len(starts) == 1:
            old, inverse, pages = numbers[:1], np.zeros(1, np.intp), lengths
        else:
            old, inverse = np.unique(numbers[starts], return_inverse=True)
            pages = np.bincount(inverse, lengths, len(old)).astype(np.int64)
        masks = [(self.masks[number] | add) & ~remove for number in old.tolist()]
        new: Numbers = np.fromiter(map(self._number, masks), np.uint32, len(masks))
        np.subtract.at(self._pages, old, pages)
        np.add.at(self._pages, new, pages)
        self._pages[0] = 0
        for number in {*old.tolist(), *new.tolist()}:
            if number and not self._pages[number]:
                del self._numbers[self.masks[number]]
                self._free.append(number)
        return np.repeat(new[inverse], lengths), int(pages[old != new].sum())

    def concern(self, holders: int) -> bool:
        """Whether the set of some page contains one of the holders in this bit mask."""
        return any(mask & holders for mask in self._numbers)

    def check_integrity(self, values: Numbers) -> None:
        """Raise AssertionError if the counted pages of a set differ from those in `values`, the numbers of all pages'
        sets, if `masks` has another set under the number of a set, or if a set is stored that no page has. The list of
        free numbers is not checked."""
        counted = np.bincount(values, minlength=len(self._pages))
        counted[0] = 0
        require(bool((counted == self._pages).all()), "pages of a set were miscounted")
        same = all(self.masks[number] == mask for mask, number in self._numbers.items())
        require(same, "a number has two sets")
        used = all(self._pages[number] > 0 for number in self._numbers.values() if number)
        require(used, "a set that no page has was not removed")

    def _number(self, mask: int) -> int:
        """Return the number of a set, given as a bit mask. A new set gets a freed number, or the next one."""
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
                if number == len(self._pages):
                    self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
            self._numbers[mask] = number
        return number
