"""The endpoint of metrics, over HTTP and over TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from quire_common.config import ServiceConfig
from quire_common.errors import ConfigError
from quire_common.identity.watched_context import WatchedContext
from quire_common.telemetry import metrics, metrics_server
from quire_common.telemetry.metrics_server import Probes
from quire_common.transport import tls_files
from tests.certificates import Authority, TlsFiles

WELL = Probes(lambda: True, lambda: True)


def test_the_endpoint_serves_and_closes() -> None:
    metrics.histogram("quire_test_wait_seconds", "Wait.").observe(0.2)
    server = metrics.serve_metrics("127.0.0.1:0", WELL)
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as response:
        body = response.read()
    assert b"quire_test_wait_seconds_count 1.0" in body and b"process_resident_memory_bytes" in body
    with pytest.raises(ConfigError) as caught:
        metrics.serve_metrics(server.address, WELL)
    assert caught.value.code == "PORT_IN_USE" and server.address in caught.value.message
    server.close()
    metrics.serve_metrics(server.address, WELL).close()


def test_connections_beyond_the_most_are_closed_at_once_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 2)
    server = metrics.serve_metrics("127.0.0.1:0", WELL)

    def connect() -> socket.socket:
        host, _, port = server.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def live(connection: socket.socket) -> bytes:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(4096), b""))

    try:
        with connect() as first, connect() as second:
            with connect() as third:
                assert third.recv(1) == b""
            for served in (first, second):
                assert b'{"live": true}' in live(served)
        for _ in range(100):
            with connect() as later, contextlib.suppress(ConnectionError):
                if b'{"live": true}' in live(later):
                    break
        else:
            pytest.fail("no connection was served any more")
    finally:
        server.close()


def context_of(config: ServiceConfig) -> ssl.SSLContext:
    return WatchedContext("metrics", tls_files(config), ssl.CERT_OPTIONAL)


def read(address: str, authority: Authority, files: TlsFiles | None, path: str = "/metrics") -> tuple[int, str]:
    """Status and body of a scrape over TLS, with the certificate of these files."""
    context = ssl.create_default_context(cafile=authority.ca)
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    try:
        with urllib.request.urlopen(f"https://{address}{path}", timeout=30, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_with_an_authority_only_readers_of_metrics_get_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.files("worker", "worker")
    metrics.counter("quire_test_secured_total", "Events.").inc()
    config = ServiceConfig(tls_cert=own.cert, tls_key=own.key, tls_ca=own.ca)
    server = metrics.serve_metrics("127.0.0.1:0", WELL, context_of(config))
    try:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))):  # a handshake that never ends holds up nobody
            for identity, status in (("metrics", 200), ("operator", 200), ("router", 403), ("", 403), (None, 403)):
                files = None if identity is None else authority.files("caller", identity)
                got, body = read(server.address, authority, files)
                assert got == status, identity
                assert ("quire_test_secured_total" in body) is (status == 200)
                # Health is for everybody: a probe of Kubernetes has no certificate.
                for path, told in (("/livez", '{"live": true}'), ("/readyz", '{"ready": true}')):
                    assert read(server.address, authority, files, path) == (200, told)
                # The code alone could be a label of a metric.
                assert body.startswith("CALLER_NOT_ALLOWED") is (status == 403)
            stranger = Authority(tmp_path, "stranger").files("stranger", "operator")
            with pytest.raises((urllib.error.URLError, OSError)):
                read(server.address, authority, stranger)
            with pytest.raises((urllib.error.URLError, OSError)):
                urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30)
    finally:
        server.close()


def test_a_certificate_alone_encrypts_and_checks_nobody(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.files("worker", "worker")
    server = metrics.serve_metrics("127.0.0.1:0", WELL, context_of(ServiceConfig(tls_cert=own.cert, tls_key=own.key)))
    try:
        assert read(server.address, authority, None)[0] == 200
    finally:
        server.close()
    with pytest.raises(ConfigError) as caught:
        metrics.serve_metrics("127.0.0.1:0", WELL, context_of(ServiceConfig(tls_cert="/nothing", tls_key=own.key)))
    assert caught.value.code == "TLS_FILE"
