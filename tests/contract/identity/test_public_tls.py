"""The certificate of the router's public ports: clients verify it, and need none of the services' authority."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import quire
from quire.cli.arguments.connection import find_server
from tests.certificates import HOST, Authority, TlsFiles
from tests.held_ports import held_ports

LIMIT_S = 60.0
PUBLIC_NAME = "quire.example"


def router(*flags: str) -> subprocess.Popen[bytes]:
    peers = ("--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1", "--log-level=error")
    return subprocess.Popen([sys.executable, "-m", "quire_router", *peers, *flags])


@contextlib.contextmanager
def secured(authority: Authority, *flags: str) -> Iterator[tuple[int, str]]:
    """A router that shows the services a certificate of the authority: its HTTP port and its gRPC address."""
    http_port, grpc_port = held_ports(2)
    own = authority.files("router", "router")
    tls = (f"--tls-cert={own.cert}", f"--tls-key={own.key}", f"--tls-ca={own.ca}")
    process = router(f"--port={http_port}", f"--listen={HOST}:{grpc_port}", *tls, *flags)
    try:
        yield http_port, f"{HOST}:{grpc_port}"
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def health(address: str, ca: str, name: str, files: TlsFiles | None = None) -> int:
    """Return the health that a client sees which trusts `ca`, and shows a certificate only if there are `files`."""
    pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes()) if files else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), *pair)
    with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        grpc.channel_ready_future(channel).result(LIMIT_S)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S).status)


def refused(address: str, ca: str, name: str) -> bool:
    """Whether the handshake of a client without a certificate fails."""
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes())
    with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_public_ports_have_their_own_certificate_and_ask_for_none(tmp_path: Path) -> None:
    inside, outside = Authority(tmp_path, "inside"), Authority(tmp_path, "outside")
    public = outside.files("public", dns=(PUBLIC_NAME,))
    flags = (f"--ssl-certfile={public.cert}", f"--ssl-keyfile={public.key}")
    with secured(inside, *flags) as (http_port, address):
        assert health(address, outside.ca, PUBLIC_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert refused(address, inside.ca, "router.quire.internal"), "the certificate is the public one"
        answer = httpx.get(f"https://{HOST}:{http_port}/livez", verify=ssl.create_default_context(cafile=outside.ca))
        assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://{HOST}:{http_port}/livez", verify=ssl.create_default_context(cafile=inside.ca))
        with quire.Client(address, tls_ca=outside.ca, tls_server_name=PUBLIC_NAME) as client:
            assert client.models() == []


def test_without_a_public_certificate_grpc_shows_the_services_and_still_asks_for_none(tmp_path: Path) -> None:
    inside = Authority(tmp_path)
    with secured(inside) as (_, address):
        assert health(address, inside.ca, "router.quire.internal") == health_pb2.HealthCheckResponse.NOT_SERVING


def test_internal_ports_still_ask_for_certificates(tmp_path: Path) -> None:
    inside = Authority(tmp_path)
    own, worker, (port,) = inside.files("kvstore", "kvstore"), inside.files("worker", "worker"), held_ports(1)
    tls = (f"--tls-cert={own.cert}", f"--tls-key={own.key}", f"--tls-ca={own.ca}")
    command = [sys.executable, "-m", "quire_kvstore", f"--listen={HOST}:{port}", "--ram-bytes=67108864", *tls]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        name = "kvstore.quire.internal"
        assert health(f"{HOST}:{port}", inside.ca, name, worker) != health_pb2.HealthCheckResponse.UNKNOWN
        assert refused(f"{HOST}:{port}", inside.ca, name)
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def test_commands_ask_for_the_authority_of_a_local_stack_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(http="https://127.0.0.1:8000", grpc="127.0.0.1:50050", tls_folder="")
    monkeypatch.setattr("quire.local.state.StateDirectory.running", lambda self: state)
    asked: Any = SimpleNamespace(address="", name="quire", tls_ca=None, tls_server_name=None)
    with pytest.raises(quire.QuireError, match="TLS") as caught:
        find_server(asked)
    assert caught.value.code == "TLS_CA_MISSING"
    asked.tls_ca = "ca.pem"
    assert find_server(asked) == (state.grpc, "ca.pem", None)
    asked.tls_ca, state.tls_folder = None, "/certs"
    assert find_server(asked) == (state.grpc, "/certs/public-ca.pem", "localhost")
