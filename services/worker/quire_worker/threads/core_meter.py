"""CoreMeter: measures the core time that this process gets, from counters of Linux; see proc_pid_schedstat and
proc_stat(5)."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

from quire_worker.threads.share import Interval

_IDLE_COLUMNS = slice(4, 6)
"""Columns of a line of /proc/stat: idle and iowait."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CoreMeter:
    """Measures intervals, each from one call of `measure_interval` to the next."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._files: dict[str, int] = {}
        self._threads: dict[str, tuple[int, int]] = {}
        self._idle_s = self._idle()
        self._at = time.monotonic()
        weakref.finalize(self, _close, self._files)
        self.measure_interval()

    @property
    def works(self) -> bool:
        """Whether this kernel reports how long threads wait for a core."""
        return bool(self._threads)

    def measure_interval(self) -> Interval:
        """Measure the time since the last call. Returns the cores that this process's threads wanted, the share of
        their runnable time in which they waited for one, and the idle cores. Threads that began or ended since then are
        left out."""
        before = self._threads
        self._list_threads()
        self._threads = dict(self._counters())
        # Threads that are new to us began some time in between: they count from the next call.
        pairs = [(now, before[thread]) for thread, now in self._threads.items() if thread in before]
        ran_ns = sum(later[0] - earlier[0] for later, earlier in pairs)
        delayed_ns = sum(later[1] - earlier[1] for later, earlier in pairs)
        idle_s, at = self._idle(), time.monotonic()
        elapsed_s = max(at - self._at, 1e-6)
        found = Interval(
            wanted_cores=(ran_ns + delayed_ns) / 1e9 / elapsed_s,
            delayed=delayed_ns / max(1, ran_ns + delayed_ns),
            idle_cores=(idle_s - self._idle_s) / elapsed_s,
        )
        self._idle_s, self._at = idle_s, at
        return found

    def _list_threads(self) -> None:
        """Open the counter files of threads that are new, and close those of threads that have ended."""
        try:
            there = {folder.name for folder in (self._proc / "self/task").iterdir()}
        except OSError:
            there = set()
        for thread in self._files.keys() - there:
            os.close(self._files.pop(thread))
        for thread in there - self._files.keys():
            with contextlib.suppress(OSError):
                self._files[thread] = os.open(self._proc / f"self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def _counters(self) -> list[tuple[str, tuple[int, int]]]:
        """Return, for each thread that still lives, its id as text, its nanoseconds on a core and its nanoseconds
        waiting for one."""
        found = []
        for thread, file in self._files.items():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                words = os.pread(file, 100, 0).split()
                found.append((thread, (int(words[0]), int(words[1]))))
        return found

    def _idle(self) -> float:
        """Return the seconds since boot in which the cores of this process were idle, or waited for input or output,
        summed over the cores; 0 if /proc/stat cannot be read."""
        try:
            lines = (self._proc / "stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0.0
        mine = [words for words in map(str.split, lines) if words and words[0] in self._cores]
        return sum(int(ticks) for words in mine for ticks in words[_IDLE_COLUMNS]) / _TICKS_PER_S


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
