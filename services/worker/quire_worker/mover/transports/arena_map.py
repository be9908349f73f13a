"""ArenaMap: a store's memory for pages, mapped to be read. Knows nothing of leases.

Offsets come from the wire and are compared with the file's size. The file must be sealed against being cut short, or a
read could kill this process. The map is let go as soon as the store's end of the connection goes, whoever uses it then:
a dead store's memory is not to outlive it for our sake.

The generation is read after the bytes. On machines that may carry out the two in another order (not x86) it is a strong
hint, and the page's own checksum, which everybody compares anyway, is what decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import threading
from typing import TYPE_CHECKING

import numpy as np

from quire_common.kv_data.frame import DataBroken
from quire_common.pages import HEADER_BYTES, PageCorrupt, copy_body

if TYPE_CHECKING:
    import socket

_HEAD_BYTES = 64
_GENERATION = struct.Struct("<Q")


class ArenaMap:
    """Takes over `fd`. `sock` is the connection that it came over. Raises DataBroken."""

    def __init__(self, fd: int, sock: socket.socket) -> None:
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise DataBroken("bad_memory", "the arena could be cut short")
            self._size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)
        except OSError as error:
            raise DataBroken("bad_memory", str(error)) from error
        finally:
            os.close(fd)
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, np.uint8)
        self._lock = threading.Lock()
        self._sock = sock
        threading.Thread(target=self._watch, name="arena-watch", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether it has been let go."""
        return self._bytes is None

    def came_over(self, sock: socket.socket) -> bool:
        """Whether that is the connection that it goes with."""
        return self._sock is sock

    def copy(self, offset: int, generation: int, body: memoryview) -> tuple[bytes, int]:
        """Copy the page there, if it still is the one of that generation; returns its header, and the checksum of the
        copy under it. Raises PageCorrupt, and DataBroken where the store has gone."""
        start, end = offset + HEADER_BYTES, offset + HEADER_BYTES + len(body)
        if not _HEAD_BYTES <= offset <= end <= self._size:
            raise PageCorrupt(f"there is no page at {offset}")
        with self._lock:
            if self._bytes is None:
                raise DataBroken("ended", "the store has gone")
            header = self._bytes[offset:start].tobytes()
            checksum = copy_body(header, self._bytes[start:end], body)
            found = _GENERATION.unpack_from(self._map, offset - _HEAD_BYTES)[0]
        if found != generation:
            raise PageGone
        return header, checksum

    def close(self) -> None:
        """Let go of it. Idempotent."""
        with self._lock:
            if self._bytes is not None:
                self._bytes = None
                self._map.close()

    def _watch(self) -> None:
        """Nothing is read here: only the end of the connection is looked for."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it has been closed already
            poll.register(self._sock, select.POLLRDHUP)
            poll.poll()
        self.close()


class PageGone(PageCorrupt):
    """Another page lies there now: the lease has ended. The store knows."""

    def __init__(self) -> None:
        super().__init__("the page has gone from its place")
