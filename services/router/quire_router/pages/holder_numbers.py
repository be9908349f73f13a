"""HolderNumbers: small numbers for the holders of pages. A number is used again only when no index contains it any
more."""

from __future__ import annotations


class HolderNumbers:
    """`alive` and `dead` are bit masks of the holders that are present, and of the holders that have left but are still
    in the indexes."""

    def __init__(self) -> None:
        self.count = 0
        self.alive = 0
        self.dead = 0
        self._free: list[int] = []

    def open(self) -> int:
        """Return a number for a new holder, which is alive now: a number that `swept` has freed, or the next one."""
        if self._free:
            number = self._free.pop()
        else:
            number, self.count = self.count, self.count + 1
        self.alive |= 1 << number
        return number

    def close(self, number: int) -> None:
        """Move the holder from `alive` to `dead`, because it has left."""
        self.alive &= ~(1 << number)
        self.dead |= 1 << number

    def swept(self, mask: int) -> None:
        """Free the dead numbers of a bit mask for new holders, since no index contains them any more."""
        self.dead &= ~mask
        self._free += [number for number in range(self.count) if mask >> number & 1]
