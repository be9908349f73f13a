"""Remembers which sequence numbers subscribers were sent, and in which epoch of the scheduler. The contract's numbers
do not contain the epoch.

A subscriber may resume at a number only if the number cannot be of an earlier epoch. This module knows nothing of
frames or subscribers.
"""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")


class SentSequences(Generic[E]):
    """The sent numbers of all subscriptions. They share one object, because a subscriber that comes back makes a new
    call. An epoch is any value that differs between two lives of the scheduler."""

    def __init__(self) -> None:
        self._epoch: E | None = None
        self._newest = 0
        # Of all epochs before this one.
        self._former = 0

    def sent(self, epoch: E, sequence: int) -> None:
        """Record that a subscriber was sent this number, in this epoch. At a new epoch, the highest number of the epoch
        before counts as a number of former epochs."""
        if epoch != self._epoch:
            self._former = max(self._former, self._newest)
            self._epoch, self._newest = epoch, 0
        self._newest = max(self._newest, sequence)

    def epoch_of(self, sequence: int) -> E | None:
        """Return the present epoch if the number is above all numbers of earlier epochs and at most the highest of this
        one. Returns None otherwise, since the number was not sent or may be of an earlier epoch."""
        return self._epoch if self._former < sequence <= self._newest else None
