"""PageDirectory: the pages that the router believes holders to have. Some were reported by holders; others are
*expected*, because a request that was just placed will fill them.

Expected pages are in two generations. New ones go to the younger generation. When the time of a generation is over, the
older one is dropped. So an expected page lasts between one and two times `expected_s`, unless its holder reports that
the page was removed. The generations change only when a page is looked up or expected, so the memory may be freed
later. A holder that leaves is no longer found at once, and its pages are swept later. Only one thread may use a
directory. The directory knows nothing of streams.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.errors import require
from quire_router.pages.holder_numbers import HolderNumbers
from quire_router.pages.page_index import PageIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from quire_router.pages.page_table import Keys

# Chains are looked up in steps: most of them are held by nobody beyond their first pages.
_STEPS = (256, 1024, 1 << 30)
# Room for expected pages, as a part of that for told ones.
_EXPECTED_PART = 8


class Prefixes(NamedTuple):
    """`depths`: by holder, the number of leading pages of the chain that it has, 0 for one that has left. Among the
    first `reported` pages, no holder whose prefix reaches a page has it only by expectation."""

    depths: NDArray[np.int32]
    reported: int


class PageDirectory:
    """`reported` is the index of the pages that holders have reported."""

    def __init__(self, max_pages: int, expected_s: float) -> None:
        self.reported = PageIndex(max_pages)
        self._expected = [PageIndex(max(max_pages // _EXPECTED_PART, 1)) for _ in range(2)]
        self._expected_s = expected_s
        # When the younger generation began, a multiple of `expected_s`.
        self._turned_s = 0.0
        self._numbers = HolderNumbers()
        self._pages: dict[int, int] = {}
        # Holders some of whose pages found no room.
        self._short: set[int] = set()

    @property
    def indexes(self) -> Sequence[PageIndex]:
        """Return all indexes: the index of reported pages, and those of both generations of expected pages."""
        return (self.reported, *self._expected)

    @property
    def nbytes(self) -> int:
        """Return the memory of all tables in bytes."""
        return sum(index.nbytes for index in self.indexes)

    @property
    def dropped(self) -> int:
        """Return the number of pages that found no room in an index."""
        return sum(index.dropped for index in self.indexes)

    @property
    def expected(self) -> int:
        """Return the number of pages that are expected of holders."""
        return sum(map(len, self._expected))

    @property
    def holders(self) -> int:
        """Return a number above those of all holders."""
        return self._numbers.count

    @property
    def present(self) -> int:
        """Return the number of holders that are present."""
        return len(self._pages)

    @property
    def dirty(self) -> bool:
        """Whether the pages of holders that have left are still to be swept."""
        return bool(self._numbers.dead)

    def open(self) -> int:
        """Add a holder, without pages; return its number."""
        holder = self._numbers.open()
        self._pages[holder] = 0
        return holder

    def close(self, holder: int) -> None:
        """Remove a holder. Its pages are not found any more, and are swept later."""
        self._numbers.close(holder)
        self._short.discard(holder)
        del self._pages[holder]

    def pages_of(self, holder: int) -> int:
        """Return the number of pages that the holder has in the index of reported pages."""
        return self._pages[holder]

    def lacks(self, holder: int) -> bool:
        """Whether some of the holder's reported pages found no room."""
        return holder in self._short

    def add(self, holder: int, keys: Keys) -> None:
        """Index pages that the holder has reported. If some find no room, the holder `lacks` pages."""
        dropped = self.reported.dropped
        self._pages[holder] += self.reported.add(holder, keys)
        if self.reported.dropped > dropped:
            self._short.add(holder)

    def remove(self, holder: int, keys: Keys) -> None:
        """Remove pages that the holder has reported as removed, from the reported pages and from the expected ones."""
        self._pages[holder] -= self.reported.remove(holder, keys)
        for index in self._expected:
            if len(index):
                index.remove(holder, keys)

    def expect(self, holder: int, keys: Keys, now_s: float) -> None:
        """Expect the holder to have these pages of one chain soon, since a request that needs them was sent there. The
        expectation ends after one to two times `expected_s`. Pages that find no room are dropped and counted."""
        self._turn_generations(now_s)
        self._expected[0].add(holder, keys, distinct=True)

    def is_held(self, keys: Keys, now_s: float) -> bool:
        """Whether some present holder has one of these pages, or is expected to."""
        self._turn_generations(now_s)
        return any(
            index.holders(number) & self._numbers.alive
            for index in self.indexes
            if len(index)
            for number in index.find(keys).tolist()
        )

    def sweep(self) -> Iterator[None]:
        """Remove the pages of holders that have left from all indexes, in steps; then free the holders' numbers.
        Between two steps, other code may use the directory."""
        dead = self._numbers.dead
        if dead:
            for index in self.indexes:
                yield from index.sweep(dead)
            self._numbers.swept(dead)

    def prefixes(self, chains: Sequence[Keys], now_s: float) -> Prefixes:
        """Return, by holder, the number of leading pages of a chain that the holder has in every group, reported or
        expected.

        `chains` are the keys of the chain, an array of equal length for each group. Expected pages are looked up only
        where reported pages do not decide: at the first page of each run of pages with the same holders, and at the
        other pages of a run while some holder has the prefix only by expectation.
        """
        self._turn_generations(now_s)
        search = _Search(self._numbers.alive, self._numbers.count, len(chains[0]))
        expected = [index for index in self._expected if len(index)]
        done = 0
        for step in _STEPS:
            window = [keys[done : done + step] for keys in chains]
            if not len(window[0]):
                break
            reported = [self.reported.find(keys) for keys in window]
            starts = _changes(reported)
            heads = [[(index, index.find(keys[starts])) for index in expected] for keys in window]
            for place, (at, end) in enumerate(pairwise([*starts, len(window[0])])):
                sure = [self.reported.holders(int(numbers[at])) for numbers in reported]
                unsure = search.keep(done + at, sure, [_holders(found, place) for found in heads])
                if unsure and end - at > 1:
                    rest = [[(index, index.find(keys[at + 1 : end])) for index in expected] for keys in window]
                    for next_ in _changes([numbers for found in rest for _, numbers in found]):
                        search.keep(done + at + 1 + next_, sure, [_holders(found, next_) for found in rest])
                if not search.alive:
                    return search.found()
            done += len(window[0])
        return search.found()

    def check_integrity(self) -> None:
        """Raise AssertionError if an index is inconsistent, or if the reported pages have an unknown holder or
        contradict a holder's number of pages."""
        for index in self.indexes:
            index.check_integrity()
        counted = dict.fromkeys(self._pages, 0)
        for mask in self.reported.masks():
            require(not mask & ~(self._numbers.alive | self._numbers.dead), "pages of nobody who was ever here")
            for holder in counted:
                counted[holder] += mask >> holder & 1
        require(counted == self._pages, "pages of holders were miscounted")

    def _turn_generations(self, now_s: float) -> None:
        """If `expected_s` has passed since the younger generation of expected pages began, drop the older one and begin
        a new one. After twice this time, drop both. A generation begins at a multiple of `expected_s`, however late
        this call comes; otherwise the pages of the generation before it would last longer than twice this time."""
        passed = int((now_s - self._turned_s) / self._expected_s)
        if passed >= 1:
            for _ in range(min(passed, 2)):
                self._expected.reverse()
                if len(self._expected[0]):
                    self._expected[0].clear()
            self._turned_s += passed * self._expected_s


class _Search:
    """A search along a chain of pages, which records where each holder's prefix ends."""

    def __init__(self, alive: int, holders: int, pages: int) -> None:
        self.alive = alive
        self._depths: NDArray[np.int32] = np.zeros(holders, np.int32)
        self._pages = self._reported = pages

    def keep(self, page: int, reported: Sequence[int], expected: Sequence[int]) -> bool:
        """Keep the holders that have page number `page` in every group, reported or expected; the prefix of all other
        holders ends here. `reported` and `expected` have a bit mask of holders for each group. Returns whether some
        holder is kept only by expectation; `found` tells the first page at which this was so."""
        held = sure = self.alive
        for known, hoped in zip(reported, expected, strict=True):
            held &= known | hoped
            sure &= known
        if held != self.alive:
            self._depths[_bits(self.alive & ~held, len(self._depths))] = page
            self.alive = held
        if held != sure:
            self._reported = min(self._reported, page)
        return held != sure

    def found(self) -> Prefixes:
        """Return the result. The holders that are left have all pages."""
        if self.alive:
            self._depths[_bits(self.alive, len(self._depths))] = self._pages
        return Prefixes(self._depths, self._reported)


def _holders(found: Sequence[tuple[PageIndex, NDArray[np.uint32]]], place: int) -> int:
    """Return, as a bit mask, the holders that have the page at `place` according to any of these indexes."""
    mask = 0
    for index, numbers in found:
        mask |= index.holders(int(numbers[place]))
    return mask


def _changes(columns: Sequence[NDArray[np.uint32]]) -> list[int]:
    """Return the places at which any of these columns of equal length changes its value, beginning with 0."""
    changed = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        changed |= column[1:] != column[:-1]
    return [0, *(np.flatnonzero(changed) + 1).tolist()]


def _bits(mask: int, length: int) -> NDArray[np.bool_]:
    """Convert a bit mask to an array of `length` booleans, lowest bit first."""
    data = np.frombuffer(mask.to_bytes(-(-length // 8), "little"), np.uint8)
    return np.unpackbits(data, count=length, bitorder="little").view(np.bool_)
