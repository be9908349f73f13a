"""How many threads of some processes want a core at once: what they make each other and everybody else wait for.

Linux tells of each thread how long it has run and how long it has waited for a core. Both together, in a second, are
the share of that second in which it wanted one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

WINDOW_S = 1.0


class CpuLoad:
    """The most of any WINDOW_S; `sample` it a few times in each. 0 where the kernel does not tell."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._began = time.monotonic()
        self._before: dict[str, int] | None = None
        self.threads = 0.0

    def sample(self, pids: Iterable[int], now: float | None = None) -> None:
        """Look at the threads of these processes; a new thread's whole time is of this window."""
        now = time.monotonic() if now is None else now
        if self._before is not None and now - self._began < WINDOW_S:
            return
        wanted = dict(each for pid in pids for each in self._wanted_ns(pid))
        if self._before is not None:
            spent_ns = sum(ns - self._before.get(thread, 0) for thread, ns in wanted.items())
            self.threads = max(self.threads, spent_ns / 1e9 / (now - self._began))
        self._began, self._before = now, wanted

    def _wanted_ns(self, pid: int) -> Iterable[tuple[str, int]]:
        for path in self._proc.glob(f"{pid}/task/*/schedstat"):
            try:
                ran_ns, waited_ns = path.read_text(encoding="ascii").split()[:2]
            except (OSError, ValueError):  # the thread has ended
                continue
            yield path.parent.name, int(ran_ns) + int(waited_ns)
