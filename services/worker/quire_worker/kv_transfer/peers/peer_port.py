"""PeerPort: accepts connections of peers that pull, up to a limit. It also serves connections that came in by the gRPC
server.

The engine has bound the sockets and keeps them. So they outlive this process, and the address that tickets name stays
valid. Each peer must show the key of an export. At the limit, a new connection replaces the one that has waited longest
without showing a key.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from quire_common.kv_data.connection import DataConnection
from quire_common.kv_data.session_threads import SessionThreads
from quire_common.telemetry.logs import get_logger
from quire_worker.kv_transfer.peers.peer_access import SHM, TCP
from quire_worker.kv_transfer.peers.peer_session import PeerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.kv_transfer.handlers import AgentContext
    from quire_worker.kv_transfer.peers.export_registry import ExportRegistry

log = get_logger(__name__)
MAX_SESSIONS = 256
# Time limit of one frame, in either direction: a stopped peer is noticed after so long.
FRAME_S = 2.0


class PeerPort:
    """Accepts and serves connections until the process ends."""

    def __init__(self, context: AgentContext, exports: ExportRegistry, max_sessions: int = MAX_SESSIONS) -> None:
        self._context = context
        self._exports = exports
        self._sessions = SessionThreads(max_sessions, "peer")
        self._listeners = {fd: socket.socket(fileno=fd) for fd in context.listeners}
        for listener in self._listeners.values():
            listener.setblocking(False)  # the process before this one may have taken who is waited for
        threading.Thread(target=self._accept, name="peer-port", daemon=True).start()

    def _accept(self) -> None:
        """Accept peers on all listeners, for ever, on a thread, and begin a session for each. A failed accept is
        logged, and the thread goes on after 10 ms."""
        poll = select.poll()
        for fd in self._listeners:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                try:
                    sock = self._listeners[fd].accept()[0]
                except OSError as error:  # it has gone already, or there are no descriptors: others will come
                    log.warning("a peer's connection was not accepted", cause=str(error))
                    time.sleep(0.01)
                    continue
                connection = DataConnection(sock, FRAME_S)
                self.begin(connection, SHM if connection.local else TCP)

    def begin(self, connection: DataConnection, transport: str, over: Callable[[], None] = lambda: None) -> None:
        """Serve a peer's connection, which came in by `transport`, on a thread of its own. It is closed at once, which
        is logged, if it gets no thread, or at the limit if each session has shown a key. `over` is called once, when
        the session has ended or was closed so. May be called from any thread."""
        session = PeerSession(connection, self._exports, self._context, transport)
        self._sessions.begin(session, lambda reason: None, over)
