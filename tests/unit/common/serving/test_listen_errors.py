"""Ports that a service cannot open: the error names the cause that the system gives."""

from __future__ import annotations

import errno
import os
import socket

import grpc
import pytest

from quire_common.config import ServiceConfig
from quire_common.errors import ConfigError
from quire_common.identity.tls_files import TlsFiles
from quire_common.serving import server
from quire_common.serving.listen_errors import find_listen_error, listen_error
from quire_common.telemetry import metrics
from quire_common.telemetry.metrics_server import Probes
from quire_kvstore.data import data_port
from quire_router.front.http.server import check_port

# This address belongs to a network for documentation, so no host has it.
NOBODYS = "192.0.2.1"
NOT_HERE = os.strerror(errno.EADDRNOTAVAIL)


@pytest.mark.parametrize(
    ("number", "code", "fix"),
    [
        (errno.EADDRINUSE, "PORT_IN_USE", "Stop the process that holds the port, or choose another with --some-port"),
        (errno.EADDRNOTAVAIL, "BAD_VALUE", "Choose an address of this host"),
        (errno.EACCES, "BAD_VALUE", "Choose an address of this host and a port that this user may open"),
        (errno.EMFILE, "BAD_VALUE", "Let the service open more files"),
        (errno.ENOBUFS, "BAD_VALUE", "Free memory"),
    ],
)
def test_error_of_a_port_has_the_code_and_the_fix_of_its_cause(number: int, code: str, fix: str) -> None:
    error = listen_error(OSError(number, os.strerror(number)), "It", "10.0.0.1:80", "--some-port")
    assert (error.code, error.param) == (code, "some_port") and error.fix.startswith(fix)
    assert error.message == f"It cannot listen on 10.0.0.1:80: {os.strerror(number)}."


def bind_grpc(address: str) -> None:
    config = ServiceConfig(listen=address, insecure=True)
    server._bind(grpc.server(None, options=[("grpc.so_reuseport", 0)]), config, TlsFiles(), "fake", lambda error: None)  # type: ignore[arg-type]  # never started


def bind_metrics(address: str) -> None:
    metrics.serve_metrics(address, Probes(lambda: True, lambda: True))


def bind_data(address: str) -> None:
    host, _, port = address.rpartition(":")
    data_port._tcp_listener(host, int(port))


def bind_http(address: str) -> None:
    host, _, port = address.rpartition(":")
    check_port(host, int(port), "port")


@pytest.mark.parametrize("bind", [bind_grpc, bind_metrics, bind_data, bind_http])
def test_only_a_port_of_another_process_is_in_use(bind: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, code, cause in (("127.0.0.1", "PORT_IN_USE", "in use"), (NOBODYS, "BAD_VALUE", NOT_HERE)):
            with pytest.raises(ConfigError, match=cause) as error:
                bind(f"{host}:{taken.getsockname()[1]}")  # type: ignore[operator]  # one of the functions above
            assert error.value.code == code


@pytest.mark.parametrize(
    ("bind", "flags"), [(bind_data, ("--listen", "--data-port")), (bind_http, ("--host", "--port"))]
)
def test_fix_names_the_option_of_the_host_and_that_of_the_port(bind: object, flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        bind(f"{NOBODYS}:0")  # type: ignore[operator]  # one of the functions above
    host, port = flags
    wanted = f"Choose an address of this host with {host}, and a port that this user may open with {port} ("
    assert error.value.fix.startswith(wanted)


def test_cause_is_found_for_a_server_that_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_listen_error(f"{NOBODYS}:0").errno == errno.EADDRNOTAVAIL
    assert find_listen_error(f"{'a' * 70}:0").errno == errno.EINVAL
    assert "another process" in str(find_listen_error("127.0.0.1:0")), "the port has become free meanwhile"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in (NOBODYS, "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        assert find_listen_error(f"two.names:{port}").errno == errno.EADDRINUSE, "it goes before the other error"
