"""Runs uvicorn in the service's own event loop, with the service's socket and signal handlers. It knows nothing of
routes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn

from quire_common.config import join_address
from quire_common.errors import ConfigError
from quire_common.identity.tls_files import TlsFiles
from quire_common.identity.watched_context import WatchedContext
from quire_common.serving.listen_errors import listen_error
from quire_router.front.http.protocol import BoundedProtocol

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Collection, Iterator

    from starlette.types import ASGIApp

_BACKLOG = 2048
# The kernel's own default grows to megabytes for every client that reads slowly, and for every body that is not read.
_SEND_BUFFER_BYTES = 256 * 1024
_RECEIVE_BUFFER_BYTES = 128 * 1024
# Longer than load balancers and client libraries keep an idle connection (60 s and less), so that they close it first.
# A server that closes first loses the request that is on its way.
KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the service's process has its own."""
        yield


class HttpServer:
    """The server answers from `start` to `close`. A client that takes nothing for `stall_s` (0: never) is disconnected.

    `flag` is the option that has the port; the error for a port that is in use names it.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        ssl_certfile: str = "",
        ssl_keyfile: str = "",
        *,
        stall_s: float = 0.0,
        flag: str = "port",
        shared: bool = False,
        max_connections: int = 0,
    ) -> None:
        """Bind the port; connections wait from now on, unless it is `shared`. Raises ConfigError if that fails. More
        connections than `max_connections` are closed at once; 0 means no limit. `shared`: other processes of this
        router bind the same port, and each gets a share of the connections."""
        self._socket = _bind(host, port, stall_s, flag, shared=shared)
        bound = self._socket.getsockname()[1]
        self.port: int = bound
        self.address = join_address(host, bound)
        self.scheme = "https" if ssl_certfile else "http"
        self._tls = TlsFiles(ssl_certfile, ssl_keyfile)
        # A class of its own, since what it holds is of this server alone.
        self._protocol: type[BoundedProtocol] = type(
            "Protocol", (BoundedProtocol,), {"max_connections": max_connections}
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=self._protocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_context_factory=self._context if ssl_certfile else None,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> Collection[BoundedProtocol]:
        """Return the open connections."""
        return self._server.server_state.connections  # type: ignore[return-value]  # all are made by our protocol

    async def start(self) -> None:
        """Start serving; return when connections are accepted. Raises ConfigError for TLS files that are incomplete or
        cannot be loaded."""
        if bool(self._tls.cert) != bool(self._tls.key):
            raise ConfigError("TLS_FILE", "Only one of ssl_certfile and ssl_keyfile is set.", "Give both as PEM files.")
        self._server.config.load()
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)  # uvicorn has no event for this
        if self._task.done():
            self._task.result()

    def begin_last_answers(self) -> None:
        """Go on serving, but close each connection after the next answer whose head is still to be sent. Clients then
        connect again, and a load balancer can send them to another router."""
        self._protocol.begin_last_answers()
        for connection in self.connections:
            connection.make_last_answer()

    def close_idle(self) -> None:
        """Close the connections that wait for a request. Connections with an open answer close after it."""
        for connection in list(self.connections):
            connection.shutdown()

    def _context(self, _config: uvicorn.Config, _default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        """Make the TLS context for uvicorn, which follows changes of the files. Raises ConfigError if they cannot be
        loaded."""
        return WatchedContext("public TLS of HTTP", self._tls)

    async def close(self) -> None:
        """Stop accepting connections, give open answers a second, and return when all connections are closed. Before
        `start`, only close the socket."""
        if self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


def check_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigError if the port cannot be bound, as when another process listens on it. A process that shares the
    port would otherwise join it silently."""
    _bind(host, port, 0.0, flag, shared=False).close()


def _bind(host: str, port: int, stall_s: float, flag: str, *, shared: bool) -> socket.socket:
    """Return a non-blocking socket that is bound to the port and, unless it is `shared`, listens. On Linux, the kernel
    closes connections whose client takes nothing for `stall_s` (0: never). With `shared`, several processes can bind
    the port. Raises ConfigError, naming `flag`, if the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT") and stall_s:
            # The kernel sees what was taken, also in the middle of a stream and after its end; connections inherit it.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(stall_s * 1000)))
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        if not shared:  # one that shares gets its connections from the moment it listens: not before it serves
            bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        address, hint = join_address(host, port), "port 0 picks a free one"
        host_flag = "--host" if flag == "port" else ""
        raise listen_error(
            error, "The router's HTTP server", address, f"--{flag}", hint, host_flag=host_flag
        ) from error
    return bound
