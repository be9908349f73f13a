"""CpuQuota: a cgroup with a quota of processor time, of version 1 or 2, whichever this host allows."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final

_V1: Final = Path("/sys/fs/cgroup/cpu")
_V2: Final = Path("/sys/fs/cgroup")
_PERIOD_US: Final = 100_000
_EMPTY_LIMIT_S: Final = 5.0
_numbers = itertools.count()


class Unavailable(Exception):
    """This process may not make cgroups with a quota here."""


class CpuQuota:
    """A context manager. `prefix` starts a command inside the group. At the end the empty group is removed."""

    def __init__(self, cores: float) -> None:
        self._cores = cores

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return a command line whose shell enters the group and becomes the command."""
        return ("/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self._group))

    def __enter__(self) -> CpuQuota:
        name, quota_us = f"quire-{os.getpid()}-{next(_numbers)}", round(self._cores * _PERIOD_US)
        version_1 = (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "cgroup.procs").exists()
        self._group = (_V1 if version_1 else _V2) / name
        try:
            self._group.mkdir()
        except OSError as error:
            raise Unavailable(str(error)) from error
        try:
            if version_1:
                (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (self._group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        except OSError as error:
            self._group.rmdir()
            raise Unavailable(str(error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.monotonic() + _EMPTY_LIMIT_S
        while (self._group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        self._group.rmdir()
