"""MaskWaits: measures how long sequences wait for masks, so that none waits for ever.

A sequence waits while the matcher's process opens it (compiles its grammar and replays its output), and after a step
that found its mask missing. If a mask is overdue, the process opens the sequence again. The engine gives up a sequence
after MOST_REPLAYS of one position, after MOST_WAIT_S, or sooner if the process makes no progress.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quire_worker.matcher.row_constraint import RowConstraint

# A mask takes milliseconds, or seconds behind a queue of slow masks. The wait doubles with each replay of a position.
OVERDUE_S = 5.0
MOST_REPLAYS = 3
# Steps in flight may still find a mask missing that has come meanwhile. After more misses of a position, it is lost.
MOST_MISSES = 4
# The process makes no progress if it opens no sequence and computes no mask for so long. It has a minute to start.
SILENT_S = 120.0
# The limit for a sequence, even if the process makes progress with others.
MOST_WAIT_S = 600.0
_CHECK_S = 0.25


class Verdict(enum.Enum):
    """The decision about a sequence that has waited too long."""

    REPLAY = enum.auto()
    GIVE_UP = enum.auto()


@dataclass(slots=True)
class _Wait:
    """The wait of one sequence for the mask of a position."""

    constraint: RowConstraint
    position: int
    since_s: float
    """When the wait began, plus the time since then in which it was not active."""
    replay_at_s: float
    replays: int = 0
    misses: int = 0
    active: bool = True
    """False: the process says that the mask is there."""
    finished_s: float = 0.0
    """When it was last said that the mask is there."""

    def resume(self, now_s: float) -> None:
        """If the process said that the mask is there, count a miss and wait again for the same position, for OVERDUE_S
        at least. The time since then does not count. Otherwise the wait goes on unchanged."""
        if not self.active:
            self.active, self.misses = True, self.misses + 1
            self.since_s += now_s - self.finished_s
            self.replay_at_s = max(self.replay_at_s, now_s + OVERDUE_S)

    @property
    def is_lost(self) -> bool:
        """Whether steps do not find the mask, although the process says that it is there."""
        return self.misses > MOST_MISSES and self.position == self.constraint.next_position

    def finish(self, now_s: float) -> None:
        """Wait no longer."""
        if self.active:
            self.active, self.finished_s = False, now_s

    def replay(self, now_s: float) -> bool:
        """Count a replay, forget the misses, and set when the next replay is due. Returns whether this replay is within
        MOST_REPLAYS."""
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

    def start_wait(self, constraint: RowConstraint) -> None:
        """Record that a sequence waits for the mask of its next token. If it waited for this position before and the
        mask was said to be there, count a miss; after more than MOST_MISSES, a check is due at once. If it still waits
        for this position, nothing changes."""
        now_s, position = self._clock(), constraint.next_position
        wait = self._waits.get(constraint.generation)
        if wait is None or wait.position != position:
            self._waits[constraint.generation] = _Wait(constraint, position, now_s, now_s + OVERDUE_S)
            return
        wait.resume(now_s)
        if wait.is_lost:
            self._next_check_s = 0.0

    def record_progress(self, count: int) -> None:
        """Compare the process's total number of masks with the last one: more masks are progress."""
        if count != self._masks:
            self._masks, self._progress_s = count, self._clock()

    def end_wait(self, constraint: RowConstraint) -> None:
        """Record that the process says that the mask is there, which is progress too. The wait is kept, to count later
        misses."""
        self._progress_s = self._clock()
        wait = self._waits.get(constraint.generation)
        if wait is not None:
            wait.finish(self._progress_s)

    def forget(self, constraint: RowConstraint) -> None:
        """Forget a sequence that has left its slot, or has failed."""
        self._waits.pop(constraint.generation, None)

    def is_due(self) -> bool:
        """Whether the waits are to be checked now: _CHECK_S after the last check, or at once for a lost mask."""
        return self._clock() >= self._next_check_s

    def overdue(self) -> Iterator[tuple[RowConstraint, Verdict]]:
        """Check the waits, and yield the sequences that have waited too long. REPLAY: the mask of an open sequence is
        overdue or lost, and is to be made again; the replay is counted, and the next one comes later. GIVE_UP: that has
        failed MOST_REPLAYS times, or the wait exceeds MOST_WAIT_S, or SILENT_S while the process makes no progress. All
        waits for one position count together."""
        now_s = self._clock()
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
