"""SharedMapCache: other processes' memory that stays mapped from one move to the next. A new map costs a fault for
every few pages of the machine, which is half a copy.

Memory is known by its file, which cannot become another's while it is mapped. What nobody used for a while is let go:
a map would keep a dead process's memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from quire_common.kv_data.frame import DataConnectionError
from quire_worker.kv_transfer.transports.shared_map import SharedMap

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_S = 5.0
_File = tuple[int, int]


class SharedMapCache:
    """Used by any thread."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._maps: dict[_File, SharedMap] = {}
        self._users: dict[_File, int] = {}
        self._timers: dict[_File, threading.Timer] = {}

    @contextlib.contextmanager
    def using(self, fd: int) -> Iterator[SharedMap]:
        """Takes over `fd`. Raises DataConnectionError where it cannot be mapped."""
        file = _file_of(fd)
        with self._lock:
            if file in self._maps:
                os.close(fd)
            else:
                self._maps[file] = SharedMap(fd)
            self._users[file] = self._users.get(file, 0) + 1
            timer = self._timers.pop(file, None)
            if timer is not None:
                timer.cancel()
        try:
            yield self._maps[file]
        finally:
            with self._lock:
                self._users[file] -= 1
                if not self._users[file]:
                    timer = self._timers[file] = threading.Timer(self._idle_s, self._close_idle, (file,))
                    timer.daemon = True
                    timer.start()

    @property
    def mapped_file(self) -> int:
        """How many there are."""
        return len(self._maps)

    def _close_idle(self, file: _File) -> None:
        with self._lock:
            if not self._users[file] and self._timers.get(file) is threading.current_thread():
                del self._users[file], self._timers[file]
                self._maps.pop(file).close()


def _file_of(fd: int) -> _File:
    try:
        status = os.fstat(fd)
    except OSError as error:
        raise DataConnectionError("bad_memory", str(error)) from error
    return status.st_dev, status.st_ino
