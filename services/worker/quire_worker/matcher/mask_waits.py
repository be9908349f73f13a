"""MaskWaits: how long sequences have waited for their masks, so that none waits for ever.

A sequence waits while its seat is opened, and when a step found its mask missing. If the mask does not come, the
matcher replays the sequence; after MOST_REPLAYS of one position, or without any sign of life of the process, the
sequence is given up.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_worker.matcher.row_constraint import RowConstraint

# A mask takes milliseconds, in a queue of slow ones seconds. The next replay of the position comes after twice as long.
OVERDUE_S = 5.0
MOST_REPLAYS = 3
# Steps in flight may still miss a mask that has come meanwhile; more misses of one position say that it was lost.
MOST_MISSES = 4
# No seat was opened, and no mask made, for so long: a process has a minute to start.
SILENT_S = 120.0
# However much the process does for others.
MOST_WAIT_S = 600.0
_CHECK_S = 0.25


class Verdict(enum.Enum):
    """The decision about a sequence that waits too long."""

    REPLAY = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(slots=True)
class _Wait:
    """The wait of one sequence for the mask of a position."""

    constraint: RowConstraint
    position: int
    since_s: float
    replay_at_s: float
    replays: int = 0
    misses: int = 0
    active: bool = True
    """False: the mask has come, or so the process says."""

    def resume(self, now_s: float) -> None:
        """Wait again for the same position."""
        if not self.active:
            self.active, self.misses = True, self.misses + 1
            self.replay_at_s = max(self.replay_at_s, now_s + OVERDUE_S)

    @property
    def is_lost(self) -> bool:
        """Whether the process says that the mask is there, and steps do not find it."""
        return self.misses > MOST_MISSES and self.position == self.constraint.next_position

    def finish(self) -> None:
        """Wait no longer."""
        self.active = False

    def replay(self, now_s: float) -> bool:
        """Count a replay; returns whether there may be one more."""
        self.replays, self.misses = self.replays + 1, 0
        self.replay_at_s = now_s + OVERDUE_S * 2**self.replays
        return self.replays <= MOST_REPLAYS


class MaskWaits:
    """Belongs to the model thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[int, _Wait] = {}
        self._progress_s = clock()
        self._masks = 0
        self._next_check_s = 0.0

    def begin(self, constraint: RowConstraint) -> None:
        """Note that a sequence waits for the mask of its next token."""
        now_s, position = self._clock(), constraint.next_position
        wait = self._waits.get(constraint.generation)
        if wait is None or wait.position != position:
            self._waits[constraint.generation] = _Wait(constraint, position, now_s, now_s + OVERDUE_S)
            return
        wait.resume(now_s)
        if wait.is_lost:
            self._next_check_s = 0.0

    def note_masks(self, count: int) -> None:
        """Take in how many masks the process has made for any sequence: with each it makes progress."""
        if count != self._masks:
            self._masks, self._progress_s = count, self._clock()

    def end(self, constraint: RowConstraint) -> None:
        """Note that the mask is there, or so the process says: it lives."""
        self._progress_s = self._clock()
        wait = self._waits.get(constraint.generation)
        if wait is not None:
            wait.finish()

    def forget(self, constraint: RowConstraint) -> None:
        """Forget a sequence that has left, or that has failed."""
        self._waits.pop(constraint.generation, None)

    def overdue(self) -> Iterator[tuple[RowConstraint, Verdict]]:
        """Yield the sequences that have waited too long, a few times a second."""
        if not self._waits:
            return
        now_s = self._clock()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_S
        is_silent = now_s - self._progress_s > SILENT_S
        for wait in list(self._waits.values()):
            if not (wait.active or wait.is_lost):
                continue
            waited_s = now_s - wait.since_s
            if waited_s > (SILENT_S if is_silent else MOST_WAIT_S):
                yield wait.constraint, Verdict.GIVE_UP
            elif wait.constraint.is_open and (now_s > wait.replay_at_s or wait.is_lost):
                yield wait.constraint, Verdict.REPLAY if wait.replay(now_s) else Verdict.GIVE_UP
