"""The HTTP server of `/metrics`, `/livez` and `/readyz`, with TLS if the service has a certificate. Each connection has
its own thread, also for its handshake. So a slow client delays no other client. Connections beyond MAX_CONNECTIONS are
closed at once."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from quire_common.identity.callers import METRICS_READERS, identity_of
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from wsgiref.types import WSGIApplication

    from prometheus_client import CollectorRegistry

MAX_CONNECTIONS = 256
_CONNECTION_S = 10.0
# The key in a request's environ that says why its client may not read metrics; empty if it may.
_REFUSAL = "quire.refusal"
log = get_logger(__name__)


@dataclass(frozen=True)
class Probes:
    """Whether the process lives, and whether the service can do its work. Both are called in a connection's thread."""

    live: Callable[[], bool]
    ready: Callable[[], bool]


class MetricsServer:
    """Serves from construction until `close`. With an authority, a client needs a certificate with an identity that may
    read metrics. Probes need no certificate."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, probes: Probes, context: ssl.SSLContext | None
    ) -> None:
        """Raises OSError for a port that is taken."""
        self._server = _Server((host, port), _Handler, context)
        self._server.set_app(_with_probes(probes, _guarded(make_wsgi_app(registry))))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{self._server.server_address[0]!s}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving, free the port, and wait for the server's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = int(_CONNECTION_S)

    def get_environ(self) -> dict[str, Any]:
        """Add whether the client may read metrics."""
        return {**super().get_environ(), _REFUSAL: _refusal(self.connection)}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are many."""


class _Server(ThreadingWSGIServer):
    def __init__(self, address: tuple[str, int], handler: type[_Handler], context: ssl.SSLContext | None) -> None:
        self.address_family = _family(address[0])
        self._context = context
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, or close the connection if there are MAX_CONNECTIONS already."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its own thread. Under TLS the handshake comes first, and may take 10 s in all. Later,
        each read and each write may take 10 s."""
        if self._context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_CONNECTION_S)
        with self._context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that failed, such as a handshake without a certificate."""
        log.debug("a scrape failed", client=str(client_address[0]))


def _with_probes(probes: Probes, app: WSGIApplication) -> WSGIApplication:
    """Wrap the application: `/livez` and `/readyz` are answered by the probes, with 200 or 503 and JSON. Other paths go
    to the application."""
    routes = {"/livez": ("live", probes.live), "/readyz": ("ready", probes.ready)}

    def probed(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a probe's path by calling the probe; pass other requests to the application."""
        route = routes.get(environ["PATH_INFO"])
        if route is None:
            return app(environ, start_response)
        name, probe = route
        well = probe()
        start_response("200 OK" if well else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps({name: well}).encode()]

    return probed


def _guarded(app: WSGIApplication) -> WSGIApplication:
    """Wrap the application: a client that may not read metrics gets 403 with the reason."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer 403 to a client that may not read metrics, else pass the request to the application."""
        if refusal := environ[_REFUSAL]:
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"CALLER_NOT_ALLOWED: {refusal}\n".encode()]
        return app(environ, start_response)

    return guarded


def _refusal(connection: object) -> str:
    """Return why the client may not read metrics, by the identity in its certificate; empty if it may. Without TLS or
    without an authority everybody may."""
    if not isinstance(connection, ssl.SSLSocket) or connection.context.verify_mode is ssl.CERT_NONE:
        return ""
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    caller = identity_of({"peer_uri": [str(name[1]).encode() for name in names if name[0] == "URI"]})
    if caller in METRICS_READERS:
        return ""
    return f"{f'the identity {caller}' if caller else 'a client without an identity'} may not read metrics."


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
