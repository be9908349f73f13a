"""ArenaMap: a store's memory for pages, mapped to be read. Knows nothing of leases.

The map is let go as soon as the store's end of the connection goes, whoever uses it then: a dead store's memory is not
to outlive it for our sake.

The generation is read after the bytes. On machines that may carry out the two in another order (not x86) it is a strong
hint, and the page's own checksum, which everybody compares anyway, is what decides.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
from typing import TYPE_CHECKING

from quire_common.pages import HEADER_BYTES, PageCorrupt
from quire_worker.kv_transfer.transports.shared_map import SharedMap

if TYPE_CHECKING:
    import socket

_HEAD_BYTES = 64
_GENERATION = struct.Struct("<Q")


class ArenaMap:
    """Takes over `fd`. `sock` is the connection that it came over. Raises DataConnectionError."""

    def __init__(self, fd: int, sock: socket.socket) -> None:
        self._map = SharedMap(fd)
        self._sock = sock
        threading.Thread(target=self._watch, name="arena-watch", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether it has been let go."""
        return self._map.closed

    def came_over(self, sock: socket.socket) -> bool:
        """Whether that is the connection that it goes with."""
        return self._sock is sock

    def copy(self, offset: int, generation: int, body: memoryview) -> tuple[bytes, int]:
        """Copy the page there, if it still is the one of that generation; returns its header, and the checksum of the
        copy under it. Raises PageCorrupt, and DataConnectionError where the store has gone."""
        if offset < _HEAD_BYTES:
            raise PageCorrupt(f"there is no page at {offset}")
        header = self._map.read(offset, HEADER_BYTES)
        checksum = self._map.copy(offset + HEADER_BYTES, header, body)
        (found,) = _GENERATION.unpack(self._map.read(offset - _HEAD_BYTES, _GENERATION.size))
        if found != generation:
            raise PageReplaced
        return header, checksum

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._map.close()

    def _watch(self) -> None:
        """Nothing is read here: only the end of the connection is looked for."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it has been closed already
            poll.register(self._sock, select.POLLRDHUP)
            poll.poll()
        self.close()


class PageReplaced(PageCorrupt):
    """Another page lies there now: the lease has ended. The store knows."""

    def __init__(self) -> None:
        super().__init__("the page has gone from its place")
