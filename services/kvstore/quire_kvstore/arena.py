"""One block of memory, handed out in extents. Knows nothing of pages.

First fit over a sorted list of free extents that merge with their neighbours: pages of one size leave no fragments, and
several sizes mix. The memory is mapped at once and becomes resident as it is written. Not thread-safe: the store's
lock guards it.
"""

from __future__ import annotations

import bisect
import mmap

_ALIGN = 64


class Arena:
    """`capacity_bytes` of anonymous memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._map = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self._free_starts = [0]
        self._free_sizes = {0: capacity_bytes}
        self._used_sizes: dict[int, int] = {}

    @staticmethod
    def footprint(size: int) -> int:
        """Bytes that an extent of `size` takes."""
        return -(-size // _ALIGN) * _ALIGN

    def allocate(self, size: int) -> int | None:
        """The offset of a new extent, or None where none fits."""
        needed = self.footprint(size)
        for index, start in enumerate(self._free_starts):
            available = self._free_sizes[start]
            if available < needed:
                continue
            del self._free_sizes[start]
            if available == needed:
                del self._free_starts[index]
            else:
                self._free_starts[index] = start + needed
                self._free_sizes[start + needed] = available - needed
            self._used_sizes[start] = needed
            self.used_bytes += needed
            return start
        return None

    def free(self, start: int) -> None:
        """Take an extent back; raises KeyError if there is none."""
        size = self._used_sizes.pop(start)
        self.used_bytes -= size
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

    def view(self, start: int, size: int) -> memoryview:
        """The bytes themselves. The caller knows that the extent is its own, and releases the view."""
        return self._view[start : start + size]

    def close(self) -> None:
        """Give the memory back. No view may be left."""
        self._view.release()
        self._map.close()

    def check_integrity(self) -> None:
        """Used and free extents cover the memory without gap or overlap, and free ones are merged."""
        used = [(start, size, False) for start, size in self._used_sizes.items()]
        extents = sorted([(start, size, True) for start, size in self._free_sizes.items()] + used)
        position, was_free = 0, False
        for start, size, free in extents:
            assert start == position, f"a gap or an overlap at {position}"
            assert not (free and was_free), f"two free extents touch at {start}"
            position, was_free = start + size, free
        assert position == self.capacity_bytes
        assert self._free_starts == sorted(self._free_sizes)
        assert self.used_bytes == sum(self._used_sizes.values())
