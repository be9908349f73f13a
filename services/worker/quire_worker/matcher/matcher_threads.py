"""Lanes: threads of the matcher's process. Each works on one seat at a time, so that a slow grammar delays few others.

    quick      masks, on the thread that takes frames in
    slow       masks of sequences that once had a slow mask (SLOW_NS), and of grammars that had a very slow one
               (VERY_SLOW_NS): first those that are expected to be done first, if each began when it was submitted
    compile    compilations, and the replay of what a sequence has sampled before, in turns

llguidance computes masks and compiles without Python's global lock, so that lanes run at the same time.

A lane records its sequence in the ring, so that after a crash the engine knows which grammars to suspect.
"""

from __future__ import annotations

import enum
import itertools
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.matcher.mask_ring import MaskRing


class MatcherThread(enum.IntEnum):
    """Which thread."""

    QUICK = 0
    SLOW = 1
    COMPILE = 2


SLOW_NS: Final = 2_000_000
"""A sequence whose mask took more processor time goes to the slow lane for good."""

VERY_SLOW_NS: Final = 20_000_000
"""So do all sequences of its grammar where a mask took more: one after the other would keep the quick lane."""
CPU_LIMIT_S: Final = 5.0
"""No piece of work takes so much processor time: compiling has two seconds in the tokenizer."""
WALL_LIMIT_S: Final = 30.0
"""Nor so long, however busy the machine."""


@dataclass(frozen=True, slots=True)
class _WorkStart:
    """When a lane began a piece of work."""

    wall_s: float
    cpu_clock: int
    """The clock of the thread's processor time."""
    cpu_s: float

    @classmethod
    def now(cls) -> _WorkStart:
        """On the calling thread."""
        clock = time.CLOCK_MONOTONIC
        if hasattr(time, "pthread_getcpuclockid"):  # macOS has none: there all time counts
            clock = time.pthread_getcpuclockid(threading.get_ident())
        return cls(time.monotonic(), clock, time.clock_gettime(clock))

    def is_overdue(self) -> bool:
        """Whether the work takes too long; from any thread."""
        cpu_s = time.clock_gettime(self.cpu_clock) - self.cpu_s
        return cpu_s > CPU_LIMIT_S or time.monotonic() - self.wall_s > WALL_LIMIT_S


class InlineExecutor:
    """Works on the thread that submits, and notes on what, and since when."""

    def __init__(self, thread: MatcherThread, ring: MaskRing) -> None:
        self.thread = thread
        self._ring = ring
        self._work_start: _WorkStart | None = None
        # Guards the sequence that the ring names for this lane, and whether that is final.
        self._record_lock = threading.Lock()
        self._is_final = False

    def submit(self, generation: int, work: Callable[[], None], expected_ns: int = 0) -> None:
        """Do what is to be done for a sequence, now."""
        self._work_on(generation, work)

    def _work_on(self, generation: int, work: Callable[[], None]) -> None:
        self._record(generation, _WorkStart.now())
        work()
        self._record(0, None)

    def _record(self, generation: int, work_start: _WorkStart | None) -> None:
        with self._record_lock:
            if not self._is_final:
                self._work_start = work_start
                self._ring.set_busy(self.thread, generation)

    def finalize_record(self) -> None:
        """Have the ring name the lane's sequence from now on if it is overdue, else none, whatever the lane works on;
        from any thread."""
        with self._record_lock:
            self._is_final = True
            if not self.is_overdue:
                self._ring.set_busy(self.thread, 0)

    @property
    def is_overdue(self) -> bool:
        """Whether it has worked on one sequence for too long; from any thread."""
        work_start = self._work_start
        return work_start is not None and work_start.is_overdue()


class ThreadExecutor(InlineExecutor):
    """A lane with a thread of its own. Of what it was given it does first what would be done first if all began when
    they were submitted. So what takes little goes first, and nothing waits for what is submitted later than its own
    time after it. `on_failure` is called where work raises."""

    def __init__(self, thread: MatcherThread, ring: MaskRing, on_failure: Callable[[], None]) -> None:
        super().__init__(thread, ring)
        self._on_failure = on_failure
        self._work: queue.PriorityQueue[tuple[int, int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._main, name=thread.name.lower(), daemon=True).start()

    def submit(self, generation: int, work: Callable[[], None], expected_ns: int = 0) -> None:
        """Queue what is to be done for a sequence; returns at once."""
        self._work.put((time.monotonic_ns() + expected_ns, next(self._numbers), generation, work))

    def _main(self) -> None:
        """Do what was queued, on this lane's thread."""
        while True:
            _, _, generation, work = self._work.get()
            try:
                self._work_on(generation, work)
            except BaseException:
                self._on_failure()
                raise


def make_executors(ring: MaskRing, on_failure: Callable[[], None]) -> dict[MatcherThread, InlineExecutor]:
    """The process's lanes: the quick one works on the thread that submits."""
    return {
        MatcherThread.QUICK: InlineExecutor(MatcherThread.QUICK, ring),
        MatcherThread.SLOW: ThreadExecutor(MatcherThread.SLOW, ring, on_failure),
        MatcherThread.COMPILE: ThreadExecutor(MatcherThread.COMPILE, ring, on_failure),
    }
