"""Which sequence numbers subscribers were sent, and in which life of the scheduler: the contract's numbers do not say.

A number says where to resume only where it cannot be of an earlier life. Knows nothing of frames or subscribers.
"""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")


class SentSequences(Generic[E]):
    """One for all subscriptions, since a subscriber that comes back makes a new call. An epoch is any value that tells
    one life of the scheduler from another."""

    def __init__(self) -> None:
        self._epoch: E | None = None
        self._newest = 0
        # Of all epochs before this one.
        self._former = 0

    def sent(self, epoch: E, sequence: int) -> None:
        """Record that a subscriber was sent this number, in this epoch."""
        if epoch != self._epoch:
            self._former = max(self._former, self._newest)
            self._epoch, self._newest = epoch, 0
        self._newest = max(self._newest, sequence)

    def epoch_of(self, sequence: int) -> E | None:
        """Return the present epoch if the number was sent in it. None where it was not, or may have been in an earlier
        epoch."""
        return self._epoch if self._former < sequence <= self._newest else None
