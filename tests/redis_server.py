"""A real Redis for tests, on a private port and without persistence. `redis_server` is a fixture to import."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BINARY = shutil.which("redis-server")
_START_LIMIT_S = 30.0


class RedisServer:
    """One redis-server child; it can be stopped and started again on the same port."""

    def __init__(self) -> None:
        if BINARY is None:
            raise FileNotFoundError("redis-server is not installed: apt-get install redis-server")
        self._folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert BINARY is not None and self._process is None
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
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
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A running server of the test's own."""
    if BINARY is None:
        pytest.fail("redis-server is not installed: apt-get install redis-server, or `make redis`")
    server = RedisServer()
    server.start()
    yield server
    server.close()
