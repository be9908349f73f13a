"""BusyProcess: a process that computes all the time on one core, as a noisy neighbour does."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType


class BusyProcess:
    """A context manager. Within it the process runs, on any free core."""

    def __enter__(self) -> BusyProcess:
        self._popen = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._popen.kill()
        self._popen.wait()
