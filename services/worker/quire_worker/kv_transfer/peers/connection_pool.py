"""ConnectionPool: keeps open data connections to peers of this host, so that the next pull can use them. A new
connection costs threads on both sides and a handshake, a large part of the time of a short pull.

Only Unix sockets are kept, since the kernel tells at once when the other end of such a socket is gone. The peer holds a
session for each connection, so only few are kept, for a short time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_common.kv_data.connection import DataConnection
    from quire_worker.kv_transfer.transports.data_link import Address

# Sooner than the peer ends it.
IDLE_S = 1.0
_MOST = 16


class ConnectionPool:
    """Idle connections by address. The threads of all pulls use the pool."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._kept: dict[Address, tuple[DataConnection, threading.Timer]] = {}
        self._closed = False

    def take_connection(self, address: Address) -> DataConnection | None:
        """Take the kept connection to this address out of the pool, or return None if there is none. The caller then
        owns the connection. The peer may have ended it meanwhile: the caller checks that, the pool does not."""
        with self._lock:
            found = self._kept.pop(address, None)
        if found is None:
            return None
        connection, timer = found
        timer.cancel()
        return connection

    def put_connection(self, address: Address, connection: DataConnection) -> None:
        """Keep an idle connection for the next pull. The connection is closed instead if it is not local, if the pool
        already has one for the address, if the pool is full or closed, or if the system has no thread left. A
        connection that no pull takes within `idle_s` is closed too."""
        with self._lock:
            if connection.local and not self._closed and address not in self._kept and len(self._kept) < _MOST:
                timer = threading.Timer(self._idle_s, self._close_idle, (address, connection))
                timer.daemon = True
                with contextlib.suppress(RuntimeError):  # no thread is left
                    timer.start()
                    self._kept[address] = connection, timer
                    return
        connection.close()

    def close(self) -> None:
        """Close all kept connections. From now on, `put_connection` closes what it is given."""
        with self._lock:
            self._closed = True
            kept, self._kept = list(self._kept.values()), {}
        for connection, timer in kept:
            timer.cancel()
            connection.close()

    def _close_idle(self, address: Address, connection: DataConnection) -> None:
        """Close a kept connection whose time is up, unless it was taken meanwhile."""
        with self._lock:
            found = self._kept.get(address)
            if found is None or found[0] is not connection:
                return
            del self._kept[address]
        connection.close()
