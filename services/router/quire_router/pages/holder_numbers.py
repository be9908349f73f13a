"""Small numbers for whoever holds pages. One is used again only when nothing in any index speaks of it any more."""

from __future__ import annotations


class HolderNumbers:
    """`alive` and `dead` are bit masks: who is there, and who has left but is still in the indexes."""

    def __init__(self) -> None:
        self.count = 0
        self.alive = 0
        self.dead = 0
        self._free: list[int] = []

    def open(self) -> int:
        """A number for a new holder."""
        if self._free:
            number = self._free.pop()
        else:
            number, self.count = self.count, self.count + 1
        self.alive |= 1 << number
        return number

    def close(self, number: int) -> None:
        """The holder has left."""
        self.alive &= ~(1 << number)
        self.dead |= 1 << number

    def swept(self, mask: int) -> None:
        """Of these, which were dead, nothing is left in any index."""
        self.dead &= ~mask
        self._free += [number for number in range(self.count) if mask >> number & 1]
