"""PageTable: a hash table from 64-bit page keys to small numbers. It consists of two numpy arrays with 12 bytes per
slot, and works on whole batches of keys.

A key lies in one of two buckets of eight slots, each in its own cache line. It goes to the first bucket while that has
room to spare, else to the emptier one. If both are full, another key moves to its own other bucket. So a batch is found
with two gathers, however full the table is, and deleting leaves no tombstones. The size is fixed, so the table never
pauses to grow. This module knows nothing of the meaning of the numbers; 0 means no number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Slots = NDArray[np.intp]

_BUCKET = 8
# One move makes room up to nine tenths; before that it is hardly ever needed.
_MOST_FULL = 0.75
# Free slots in its first bucket with which a key does not look at the second.
_SPARE = 2
_EMPTY = np.uint64(0)
# So many keys are looked up faster one by one.
_FEW = 12
# Of the slots of a bucket as bits of a byte: how many there are, and the number of the lowest.
_COUNT = np.array([bits.bit_count() for bits in range(256)], np.int8)
_LOWEST = np.array([0, *((bits & -bits).bit_length() - 1 for bits in range(1, 256))], np.intp)


class PageTable:
    """A table for at most `max_pages` keys. Keys must be uniformly distributed, such as parts of sha256; 0 is not a
    key."""

    def __init__(self, max_pages: int) -> None:
        buckets = 1 << max(0, int(np.ceil(np.log2(max_pages / (_BUCKET * _MOST_FULL)))))
        self.capacity = max_pages
        self.count = 0
        self._mask = np.uint64(buckets - 1)
        self._keys: Keys = np.zeros(buckets * _BUCKET, np.uint64)
        self._rows = self._keys.reshape(buckets, _BUCKET)
        self.values: NDArray[np.uint32] = np.zeros(buckets * _BUCKET, np.uint32)
        """By slot. Callers change those of slots that they have found."""

    @property
    def nbytes(self) -> int:
        """Return the memory of the arrays in bytes. The system allocates it when it is first written."""
        return self._keys.nbytes + self.values.nbytes

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self._keys)

    def find(self, keys: Keys) -> Slots:
        """Return the slot of each key, -1 if it is not in the table."""
        slots, missing = self._match(keys, self._first(keys))
        if len(missing):
            others = keys[missing]
            slots[missing], _ = self._match(others, self._second(others))
        return slots

    def get(self, keys: Keys) -> NDArray[np.uint32]:
        """Return the value of each key, 0 if it is not in the table."""
        if len(keys) <= _FEW:
            return np.array([self._value(key) for key in keys.tolist()], np.uint32)
        slots = self.find(keys)
        return np.where(slots >= 0, self.values[slots], np.uint32(0))

    def put(self, keys: Keys) -> Slots:
        """Insert the missing ones of these distinct keys with the value 0. A key goes to its first bucket or, if that
        is nearly full, to the emptier of its two; if both are full, another key moves. Returns the slot of each key. It
        is -1 if no key can move, or if the table has `max_pages` keys already; the first missing keys get the last
        places. A key that moves changes its slot, so slots from earlier calls are not valid any more."""
        slots = self.find(keys)
        pending, stuck = np.flatnonzero(slots < 0)[: max(self.capacity - self.count, 0)], list[int]()
        while len(pending):
            wanted = keys[pending]
            buckets = self._first(wanted)
            free = self._free(buckets)
            tight = np.flatnonzero(_COUNT[free] < _SPARE)
            if len(tight):
                other = self._second(wanted[tight])
                other_free = self._free(other)
                better = _COUNT[other_free] > _COUNT[free[tight]]
                moved = tight[better]
                buckets[moved], free[moved] = other[better], other_free[better]
            at = buckets * _BUCKET + _LOWEST[free]
            fits = free > 0
            if not fits.all():
                stuck += pending[~fits].tolist()
                pending, wanted, at = pending[fits], wanted[fits], at[fits]
            # Of several that want one slot the last gets it; the others look again.
            self._keys[at] = wanted
            won = self._keys[at] == wanted
            slots[pending[won]] = at[won]
            self.count += int(won.sum())
            pending = pending[~won]
        if stuck:
            for index in stuck:
                self._insert_by_moving(keys[index : index + 1])
            slots = self.find(keys)
        return slots

    def drop(self, slots: Slots) -> None:
        """Remove the keys in these distinct slots."""
        self._keys[slots] = _EMPTY
        self.values[slots] = 0
        self.count -= len(slots)

    def clear(self) -> None:
        """Remove all keys."""
        self._keys[:] = _EMPTY
        self.values[:] = 0
        self.count = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if a key is not found in its own slot, if an empty slot has a value, or if the count is
        wrong."""
        taken = np.flatnonzero(self._keys)
        require(len(taken) == self.count, "the table lost count")
        require(not self.values[self._keys == _EMPTY].any(), "an empty slot has a value")
        found = self.find(self._keys[taken]) == taken
        require(bool(found.all()), "a key is not found, or is there twice")

    def _insert_by_moving(self, key: Keys) -> None:
        """Insert one key whose two buckets are full: move a key of these buckets with its value to its own other
        bucket, and take its slot with the value 0. Does nothing if no key can move."""
        for bucket in (self._first(key), self._second(key)):
            others = self._rows[bucket[0]]
            first, second = self._first(others), self._second(others)
            elsewhere = np.where(first == bucket, second, first)
            free = self._rows[elsewhere] == _EMPTY
            movable = np.flatnonzero(free.any(axis=1))
            if len(movable):
                column = movable[0]
                source = bucket[0] * _BUCKET + column
                target = elsewhere[column] * _BUCKET + free[column].argmax()
                self._keys[target], self.values[target] = self._keys[source], self.values[source]
                self._keys[source], self.values[source] = key[0], 0
                self.count += 1
                return

    def _match(self, keys: Keys, buckets: Slots) -> tuple[Slots, Slots]:
        """Look for keys in these buckets. Returns the slot of each key, -1 if it is not there, and the indices of the
        missing keys."""
        hits = np.packbits(self._rows.take(buckets, axis=0) == keys[:, None], bitorder="little")
        slots: Slots = buckets * _BUCKET + _LOWEST[hits]
        missing = np.flatnonzero(hits == 0)
        slots[missing] = -1
        return slots, missing

    def _free(self, buckets: Slots) -> NDArray[np.uint8]:
        """Return, for each bucket, which of its slots are free, as a bit mask."""
        return np.packbits(self._rows.take(buckets, axis=0) == _EMPTY, bitorder="little")

    def _value(self, key: int) -> int:
        """Return the value of one key, 0 if it is not in the table. For a few keys, this is faster than numpy."""
        mask = int(self._mask)
        for start in ((key & mask) * _BUCKET, (key >> 32 & mask) * _BUCKET):
            bucket = self._keys[start : start + _BUCKET].tolist()
            if key in bucket:
                return int(self.values[start + bucket.index(key)])
        return 0

    def _first(self, keys: Keys) -> Slots:
        return (keys & self._mask).view(np.intp)

    def _second(self, keys: Keys) -> Slots:
        return ((keys >> np.uint64(32)) & self._mask).view(np.intp)
