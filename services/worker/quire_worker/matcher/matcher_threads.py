"""The threads of the matcher's process, each with an executor. Slow grammars have threads of their own, so that they
delay few others.

    quick      computes masks; this thread also handles the engine's frames, which the main thread reads
    slow       computes the masks of sequences that had a slow mask (SLOW_NS), and of grammars that had a very slow one
               (VERY_SLOW_NS)
    compile    compiles grammars, and replays the output of sequences, in turns

llguidance releases Python's global lock while it computes a mask or compiles, so that threads run at the same time.

A thread works on one sequence at a time, and records it in the mask ring. So after a crash the engine knows which
grammars to suspect.
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
    """The name of a thread, and its index in the mask ring."""

    QUICK = 0
    SLOW = 1
    COMPILE = 2


SLOW_NS: Final = 2_000_000
"""A sequence whose mask took more processor time moves to the slow thread, for good."""

VERY_SLOW_NS: Final = 20_000_000
"""If a mask took more, all sequences with its grammar move: else each of them would block the quick thread once."""
CPU_LIMIT_S: Final = 5.0
"""A thread that spends more processor time on one piece of work is overdue. Compiling takes at most two seconds, the
tokenizer's limit."""
WALL_LIMIT_S: Final = 30.0
"""So is a thread that needs more time in all, since even a busy machine is faster."""


@dataclass(frozen=True, slots=True)
class _WorkStart:
    """The time at which a thread started a piece of work, by two clocks."""

    wall_s: float
    cpu_clock: int
    """The clock of the thread's processor time."""
    cpu_s: float

    @classmethod
    def now(cls) -> _WorkStart:
        """Return the time by the wall clock, and by the calling thread's clock of processor time. Without such a clock,
        as on macOS, the wall clock replaces it."""
        clock = time.CLOCK_MONOTONIC
        if hasattr(time, "pthread_getcpuclockid"):  # macOS has no such clock: all time counts there
            clock = time.pthread_getcpuclockid(threading.get_ident())
        return cls(time.monotonic(), clock, time.clock_gettime(clock))

    def is_overdue(self) -> bool:
        """Whether the work takes too long. Any thread may ask."""
        cpu_s = time.clock_gettime(self.cpu_clock) - self.cpu_s
        return cpu_s > CPU_LIMIT_S or time.monotonic() - self.wall_s > WALL_LIMIT_S


class InlineExecutor:
    """Does work at once, on the thread that submits it. Records the sequence and the start of the work."""

    def __init__(self, thread: MatcherThread, ring: MaskRing) -> None:
        self.thread = thread
        self._ring = ring
        self._work_start: _WorkStart | None = None
        # Guards the ring's record of this thread, and whether that is final.
        self._record_lock = threading.Lock()
        self._is_final = False

    def submit(self, generation: int, work: Callable[[], None], expected_ns: int = 0) -> None:
        """Do a piece of work for the sequence of this generation. Returns when it is done."""
        self._work_on(generation, work)

    def _work_on(self, generation: int, work: Callable[[], None]) -> None:
        """Do the work, with the sequence and the start of the work in the record meanwhile. If the work raises, the
        record stays, so that the ring names the sequence."""
        self._record(generation, _WorkStart.now())
        work()
        self._record(0, None)

    def _record(self, generation: int, work_start: _WorkStart | None) -> None:
        """Record, in the ring and in this object, on which sequence the thread works and since when; 0 and None: on
        none. Does nothing after `finalize_record`."""
        with self._record_lock:
            if not self._is_final:
                self._work_start = work_start
                self._ring.set_busy(self.thread, generation)

    def finalize_record(self) -> None:
        """Fix the ring's record of this thread: its sequence if it is overdue, else none. Later work does not change
        the record. Any thread may call this."""
        with self._record_lock:
            self._is_final = True
            if not self.is_overdue:
                self._ring.set_busy(self.thread, 0)

    @property
    def is_overdue(self) -> bool:
        """Whether it has worked on one sequence for too long. Any thread may ask."""
        work_start = self._work_start
        return work_start is not None and work_start.is_overdue()


class ThreadExecutor(InlineExecutor):
    """Queues work for a thread of its own. The order is by the time of submission plus the expected time of the work.
    So short work goes first, but long work does not wait for work that is submitted much later. If work raises,
    `on_failure` is called."""

    def __init__(self, thread: MatcherThread, ring: MaskRing, on_failure: Callable[[], None]) -> None:
        super().__init__(thread, ring)
        self._on_failure = on_failure
        self._work: queue.PriorityQueue[tuple[int, int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._main, name=thread.name.lower(), daemon=True).start()

    def submit(self, generation: int, work: Callable[[], None], expected_ns: int = 0) -> None:
        """Queue a piece of work for the sequence of this generation. Returns at once."""
        self._work.put((time.monotonic_ns() + expected_ns, next(self._numbers), generation, work))

    def _main(self) -> None:
        """Do the queued work, on the executor's thread, for ever. If work raises, call `on_failure`, and let the
        exception end the thread."""
        while True:
            _, _, generation, work = self._work.get()
            try:
                self._work_on(generation, work)
            except BaseException:
                self._on_failure()
                raise


def make_executors(ring: MaskRing, on_failure: Callable[[], None]) -> dict[MatcherThread, InlineExecutor]:
    """Make an executor for each thread. The quick thread is the one that submits; the others start here. If their work
    raises, `on_failure` is called."""
    return {
        MatcherThread.QUICK: InlineExecutor(MatcherThread.QUICK, ring),
        MatcherThread.SLOW: ThreadExecutor(MatcherThread.SLOW, ring, on_failure),
        MatcherThread.COMPILE: ThreadExecutor(MatcherThread.COMPILE, ring, on_failure),
    }
