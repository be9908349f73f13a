"""DataPort: accepts data connections over TCP and over a Unix socket, up to a limit.

The Unix socket is abstract and has a random name, which clients learn over gRPC. So no file can be left behind, and
only processes of the same host (of the same network namespace) find it. Each client must show the key of a lease. At
the limit, a new connection replaces the one that has waited longest without showing a key; if all have shown one, the
new connection is refused.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from quire_common.config import join_address
from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.seal import AVAILABLE
from quire_common.kv_data.session_threads import SessionThreads
from quire_common.serving.listen_errors import listen_error
from quire_common.telemetry.logs import get_logger
from quire_kvstore.data.data_metrics import DataMetrics
from quire_kvstore.data.data_session import DataSession

if TYPE_CHECKING:
    from quire_kvstore.config import KvstoreConfig
    from quire_kvstore.page_store import PageStore

log = get_logger(__name__)
ARENA_PREFIX = "quire-kvstore-"
_BACKLOG = 64
_JOIN_S = 5.0


class DataPort:
    """The listeners of the data connections. They listen from construction on, and serve after `start`: one on TCP
    unless the option `data_port` is negative, one on a Unix socket if `share_memory` is set and the arena can be
    sealed. Clients get `port` and `arena`; these are 0 and empty if there is no such listener; without the package
    cryptography there is none. Raises ConfigError if the port cannot be opened."""

    def __init__(self, config: KvstoreConfig, host: str, store: PageStore) -> None:
        self._config = config
        self._store = store
        self._sessions = SessionThreads(config.max_data_connections, "data")
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listeners: dict[int, tuple[socket.socket, DataMetrics]] = {}
        self._thread = threading.Thread(target=self._accept, name="data-port", daemon=True)
        self._is_closed = False
        self.port, self.arena = 0, ""
        if not AVAILABLE:
            log.warning("pages go over gRPC alone: the package cryptography is not installed")
            return
        if config.data_port >= 0:
            listener = _tcp_listener(host, config.data_port)
            self.port = int(listener.getsockname()[1])
            self._listeners[listener.fileno()] = (listener, DataMetrics("tcp"))
        if config.share_memory and store.shareable_fd() is not None:
            self.arena = ARENA_PREFIX + secrets.token_hex(16)
            unix_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix_listener.bind("\0" + self.arena)
            unix_listener.listen(_BACKLOG)
            self._listeners[unix_listener.fileno()] = (unix_listener, DataMetrics("shm"))

    def start(self) -> None:
        """Take connections."""
        self._thread.start()

    def drain(self, timeout_s: float) -> None:
        """Wait until no connection works on a request, but for `timeout_s` at most. Connections stay open."""
        self._sessions.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop accepting, close the listeners, and end all connections. Waits up to 5 s for each thread that serves
        one. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for listener, _ in self._listeners.values():
            listener.close()
        self._sessions.close(_JOIN_S)
        os.close(self._stop)

    def __len__(self) -> int:
        return len(self._sessions)

    def _accept(self) -> None:
        """Accept connections on all listeners, and serve each by a thread of its own, until `close`. A failed accept is
        logged, and the next one follows after 10 ms. Runs in the port's thread."""
        poll = select.poll()
        for fd in (self._stop, *self._listeners):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop:
                    return
                listener, metrics = self._listeners[fd]
                try:
                    sock = listener.accept()[0]
                except OSError as error:  # it has gone already, or there are no descriptors: others will come
                    log.warning("a data connection was not accepted", cause=str(error))
                    time.sleep(0.01)
                    continue
                self._begin(sock, metrics)

    def _begin(self, sock: socket.socket, metrics: DataMetrics) -> None:
        """Serve the connection in a thread of its own, and count it while it lasts. If there are too many connections,
        one without a key is ended for it, or it is refused (see SessionThreads.begin)."""
        connection = DataConnection(sock, self._config.data_timeout_s)
        session = DataSession(connection, self._store, metrics, self._config)
        metrics.connections.inc()
        self._sessions.begin(session, metrics.refused, metrics.connections.dec)


def _tcp_listener(host: str, port: int) -> socket.socket:
    """Open the data port's listening socket, IPv6 if the host has a colon. Raises ConfigError if it cannot listen
    there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        address, hint = join_address(host, port), "0 picks a free port, -1 opens none"
        raise listen_error(
            error, "The kvstore's data port", address, "--data-port", hint, host_flag="--listen"
        ) from error
