"""ExtentAllocator: the free parts of a block, as extents. It allocates by first fit and merges free neighbours. It
touches no memory.

Not thread-safe: the store's lock guards it.
"""

from __future__ import annotations

import bisect

from quire_common.errors import require


class ExtentAllocator:
    """`capacity_bytes` in extents whose sizes their users choose."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free_starts = [0]
        self._free_sizes = {0: capacity_bytes}
        self._used_sizes: dict[int, int] = {}

    def allocate(self, unit: int, most: int) -> tuple[int, int] | None:
        """Allocate an extent of one to `most` units of `unit` bytes, as large as possible, in the first free extent
        with room for at least one unit. Returns its start and its number of units; None if there is no room for one
        unit."""
        for index, start in enumerate(self._free_starts):
            available = self._free_sizes[start]
            if available < unit:
                continue
            units = min(most, available // unit)
            size = units * unit
            del self._free_sizes[start]
            if available == size:
                del self._free_starts[index]
            else:
                self._free_starts[index] = start + size
                self._free_sizes[start + size] = available - size
            self._used_sizes[start] = size
            return start, units
        return None

    def free(self, start: int) -> None:
        """Give back the extent that starts there, merged with free neighbours. Raises KeyError if it is not in use."""
        size = self._used_sizes.pop(start)
        index = bisect.bisect_left(self._free_starts, start)
        if index < len(self._free_starts) and self._free_starts[index] == start + size:
            size += self._free_sizes.pop(self._free_starts.pop(index))
        if index > 0:
            before = self._free_starts[index - 1]
            if before + self._free_sizes[before] == start:
                self._free_sizes[before] += size
                return
        self._free_starts.insert(index, start)
        self._free_sizes[start] = size

    def check_integrity(self) -> None:
        """Raise AssertionError unless used and free extents cover the block without gap or overlap, and free ones are
        merged."""
        used = [(start, size, False) for start, size in self._used_sizes.items()]
        extents = sorted([(start, size, True) for start, size in self._free_sizes.items()] + used)
        position, was_free = 0, False
        for start, size, free in extents:
            require(start == position, f"a gap or an overlap at {position}")
            require(not (free and was_free), f"two free extents touch at {start}")
            position, was_free = start + size, free
        require(position == self.capacity_bytes, "extents end before the block, or after it")
        require(self._free_starts == sorted(self._free_sizes), "a free extent is not listed, or twice")
