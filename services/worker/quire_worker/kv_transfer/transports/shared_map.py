"""Memory of other processes, mapped for reading. SharedMap is one mapping; SharedMapCache keeps mappings from one move
to the next. Neither knows the owner of the memory.

Offsets come from the wire and are compared with the file's size. The file must be sealed against shrinking, since a
read past its end would kill this process. The owner may write to the memory during a read; only copies are checked.

A new mapping costs a page fault for every few memory pages, half the time of a copy. So mappings are kept. The file
identifies a mapping, since another file cannot take its identity while it is mapped. A mapping that was unused for a
while is closed, since it would keep a dead process's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from quire_common.kv_data.frame import DataConnectionError
from quire_common.pages import PageCorrupt, copy_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class SharedMap:
    """One read-only mapping of a whole file. Takes over `fd`. Raises DataConnectionError if the file is empty, could be
    cut short, or cannot be mapped."""

    def __init__(self, fd: int) -> None:
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise DataConnectionError("bad_memory", "the memory could be cut short")
            self.size = os.fstat(fd).st_size
            mapped = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise DataConnectionError("bad_memory", str(error)) from error
        finally:
            os.close(fd)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._bytes is None

    def read(self, start: int, size: int) -> bytes:
        """The bytes of this range; raises PageCorrupt outside of the file, DataConnectionError once the map is
        closed."""
        return self._view(start, size).tobytes()

    def copy(self, start: int, header: bytes, into: memoryview) -> int:
        """Fill `into` with the page body that begins at `start`; returns the copy's checksum under that header. Raises
        PageCorrupt outside of the file, DataConnectionError once the map is closed."""
        return copy_body(header, self._view(start, len(into)), into)

    def close(self) -> None:
        """Close the map, which is unmapped when nobody copies from it any more. Idempotent."""
        self._bytes = None

    def _view(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return a view of `size` bytes from `start` on. Raises PageCorrupt if they are not all in the file,
        DataConnectionError once the map is closed."""
        found = self._bytes
        if found is None:
            raise DataConnectionError("ended", "the memory's owner has gone")
        if not 0 <= start <= start + size <= self.size:
            raise PageCorrupt(f"there is no page at {start}")
        return found[start : start + size]


IDLE_S = 5.0
_File = tuple[int, int]


class SharedMapCache:
    """One map per file, which is kept from one move to the next. `idle_s`: how long an unused map is kept, in seconds.
    Used by any thread."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._maps: dict[_File, SharedMap] = {}
        self._users: dict[_File, int] = {}
        self._timers: dict[_File, threading.Timer] = {}

    @contextlib.contextmanager
    def using(self, fd: int) -> Iterator[SharedMap]:
        """Context manager: yield a map of the file, the kept one or a new one. Takes over `fd`. The map stays open
        while anybody uses it. A timer then runs for `idle_s`, and its thread closes the map unless the map is used
        again before. If the system has no thread left for the timer, the map is closed at once.

        Raises DataConnectionError if the file is empty, is not sealed against shrinking, or cannot be mapped.
        """
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
                    self._close_later(file)

    @property
    def mapped_file(self) -> int:
        """Number of files that are mapped."""
        return len(self._maps)

    def _close_later(self, file: _File) -> None:
        """Start the timer that closes a map which nobody uses. Called with the lock held."""
        timer = threading.Timer(self._idle_s, self._close_idle, (file,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread is left
            self._close(file)
        else:
            self._timers[file] = timer

    def _close(self, file: _File) -> None:
        del self._users[file]
        self._maps.pop(file).close()

    def _close_idle(self, file: _File) -> None:
        """Close and forget a map, unless somebody has used it since this timer began. Runs on the timer's thread."""
        with self._lock:
            if not self._users.get(file, 1) and self._timers.get(file) is threading.current_thread():
                del self._timers[file]
                self._close(file)


def _file_of(fd: int) -> _File:
    """Return device and inode, which identify a file. Raises DataConnectionError if `fd` is bad."""
    try:
        status = os.fstat(fd)
    except OSError as error:
        raise DataConnectionError("bad_memory", str(error)) from error
    return status.st_dev, status.st_ino
