"""A router process of a test's own, beside the one that a stack has: it can be ended and started again at its ports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.held_ports import held_ports

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
_POLL_S = 0.02


class RouterProcess:
    """A context. `flags` are the router's, without those of its ports. Its log goes to a file."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.http_port, self.grpc_port = held_ports(2)
        self.http = f"http://127.0.0.1:{self.http_port}"
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self._flags = [f"--port={self.http_port}", f"--listen={self.grpc}", *flags]
        self._log = tempfile.NamedTemporaryFile(prefix="router-", suffix=".log")  # noqa: SIM115  # closed by __aexit__
        self.process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            await self.end(signal.SIGKILL)
        self._log.close()

    async def start(self) -> None:
        """Start it, and return when it says that it is ready."""
        self.process = self._spawn()
        deadline = time.monotonic() + LIMIT_S
        async with httpx.AsyncClient(trust_env=False, base_url=self.http) as client:
            while not await is_ready(client):
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                await asyncio.sleep(_POLL_S)

    @property
    def ended(self) -> bool:
        """Whether the process that was started last has ended."""
        return self.process is None or self.process.poll() is not None

    def _spawn(self) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_ROUTER_")}
        command = [sys.executable, "-m", "quire_router", *self._flags]
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=self._log)

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal that ends the process; return its exit code when it has ended."""
        assert self.process is not None
        self.send(signal.SIGCONT)
        self.send(number)
        code = await asyncio.to_thread(self.process.wait, LIMIT_S)
        self.process = None
        return code

    @property
    def log_file(self) -> Path:
        """Where it logs."""
        return Path(self._log.name)

    def log(self) -> str:
        """The end of what it has logged."""
        return self.log_file.read_text()[-2000:]


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Whether a router's /health says so."""
    try:
        return (await client.get("/health", timeout=2.0)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
