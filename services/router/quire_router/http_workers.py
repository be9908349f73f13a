"""HttpWorkers: further processes of one router that serve HTTP on the same port. The kernel divides connections among
them (SO_REUSEPORT).

The first process starts the others with its own command line, and restarts those that die. Each process is a complete
router with its own sessions. The others end when the first process ends, because their standard input then ends. Only
the HTTP port is shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from quire_common.config import join_address, split_address
from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from quire_router.config import RouterConfig

log = get_logger(__name__)
_KILL_AFTER_S = 5.0
_HURRY_S = 0.2
_STEADY_S = 60.0


class HttpWorkers:
    """The other processes. Does nothing if there is only one process. In one of the other processes, it watches the
    first."""

    def __init__(self, config: RouterConfig, instance: str, port: int) -> None:
        self._config = config
        self._instance = instance
        self._port = port
        self._stopping = False
        self._processes: dict[int, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the other processes, and keep them running. In one of those, watch for the end of the first process
        instead."""
        if self._config.http_worker:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _check_parent)
            return
        self._tasks = [
            asyncio.create_task(self._keep_running(number), name=f"http worker {number}")
            for number in range(1, self._config.http_workers)
        ]

    def leave(self) -> None:
        """Send SIGTERM to the other processes, so that they finish their requests and end, and start none again.
        Idempotent, since a second signal would cut their `--drain-delay-s` short."""
        if self._stopping:
            return
        self._stopping = True
        for process in self._processes.values():
            _terminate(process)

    async def drain(self, timeout_s: float) -> None:
        """Tell the other processes to finish their requests and end. Wait until they have ended, but at most
        `timeout_s`."""
        self.leave()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Drain the other processes for at most 5 s, then kill those that are left."""
        if self._tasks:
            await self.drain(_KILL_AFTER_S)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_running(self, number: int) -> None:
        """Run the process of this number. When it ends, also with status 0, or cannot be started, log that and start it
        again after a backoff, until the processes are told to leave. The backoff begins again after a process that ran
        for _STEADY_S."""
        backoff = Backoff()
        while not self._stopping:
            began_s = time.monotonic()
            try:
                process = await asyncio.create_subprocess_exec(*self._command(number), stdin=asyncio.subprocess.PIPE)
            except OSError as error:
                log.warning("http worker cannot be started", number=number, reason=str(error))
                await backoff.wait()
                continue
            self._processes[number] = process
            if self._stopping:  # since before the process had started, so `leave` did not reach it
                _terminate(process)
            log.info("http worker started", number=number, pid=process.pid)
            code = await process.wait()
            del self._processes[number]
            if not self._stopping:
                log.warning("http worker died", number=number, code=code)
                if time.monotonic() - began_s >= _STEADY_S:
                    backoff.reset()
                await backoff.wait()

    def _command(self, number: int) -> list[str]:
        """Return the command line of process `number`: the one of this process, then the flags that differ. These are
        its number, the shared HTTP port, a free local gRPC port without an advertised address, its instance, and, if
        metrics have a port, one that is `number` higher (0 stays 0). The last of two equal flags counts."""
        own = {
            "http-worker": str(number),
            "port": str(self._port),
            "listen": "127.0.0.1:0",
            "advertise": "",
            "instance": f"{self._instance}-http-{number}",
        }
        if self._config.metrics_listen:
            host, port = split_address(self._config.metrics_listen, "metrics_listen")
            own["metrics-listen"] = join_address(host, port + number if port else 0)
        return [sys.executable, "-m", "quire_router", *sys.argv[1:], *(f"--{key}={text}" for key, text in own.items())]


def check_shared_limits(config: RouterConfig, *, limited: bool) -> None:
    """Raise ConfigError if keys are limited (`limited`), and several processes without a Redis would each count for
    themselves."""
    if config.http_workers > 1 and limited and not config.redis:
        raise ConfigError(
            "LIMITS_NEED_REDIS",
            f"{config.http_workers} processes cannot enforce the limits of API keys together without a Redis.",
            "Give --redis, or run one process.",
            param="http_workers",
        )


def _terminate(process: Process) -> None:
    """Send SIGTERM to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


def _check_parent() -> None:
    """End this process if its standard input has ended: send it SIGTERM, and again after 0.2 s, so that it does not
    wait for its drain delay. No process ever writes to this input, so its end means that the first process is dead."""
    if not os.read(sys.stdin.fileno(), 1024):
        loop = asyncio.get_running_loop()
        loop.remove_reader(sys.stdin.fileno())
        os.kill(os.getpid(), signal.SIGTERM)
        # A second signal, which ends the delay: the first process's successor needs the port.
        loop.call_later(_HURRY_S, os.kill, os.getpid(), signal.SIGTERM)
