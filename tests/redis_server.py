"""A real Redis for tests, on a private port and without persistence. `redis_server` is a fixture to import."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.certificates import TlsFiles

BINARY = shutil.which("redis-server")
_START_LIMIT_S = 30.0


class RedisServer:
    """One redis-server child; it can be stopped and started again on the same port. With certificates it speaks TLS
    alone."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        if BINARY is None:
            raise FileNotFoundError("redis-server is not installed: apt-get install redis-server")
        self._folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._tls = tls
        self.url = f"redis://127.0.0.1:{self.port}/0"
        if tls is not None:
            self.url = f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={tls.ca}"

    def start(self) -> None:
        assert BINARY is not None and self._process is None
        command = [BINARY, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        if self._tls is None:
            command += ["--port", str(self.port)]
        else:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", self._tls.cert, "--tls-key-file", self._tls.key]
            command += ["--tls-ca-cert-file", self._tls.ca]
        log = Path(self._folder.name) / "redis.log"
        self._process = subprocess.Popen([*command, "--dir", self._folder.name, "--logfile", str(log)])
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"redis-server did not start:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends this very child; its memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It keeps its port and its connections, and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as plain, self._secured(plain) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def _secured(self, plain: socket.socket) -> socket.socket:
        if self._tls is None:
            return plain
        return ssl.create_default_context(cafile=self._tls.ca).wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A running server of the test's own."""
    if BINARY is None:
        pytest.fail("redis-server is not installed: apt-get install redis-server, or `make redis`")
    server = RedisServer()
    server.start()
    yield server
    server.close()
