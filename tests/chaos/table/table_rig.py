"""TableRig: two replicas, two tokenizers, a kvstore, a Redis, and two routers behind Envoy, with a handle on all of it.

A TCP relay stands on every edge between two services, each process has a clock that a file sets, and the kvstore's disk
is a file system of its own. Routers find the others through Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from quire.local.pids import ProcessId
from quire.local.spec import LOOPBACK, SERVICES, service_of
from quire.local.state import StateDirectory
from tests.chaos.kv.kv_rig import kv_stats, until
from tests.chaos.rig import LIMIT_S, Rig
from tests.chaos.routers.envoy import ROOT, Envoy, envoy_before
from tests.redis_server import RedisServer
from tests.router_process import RouterProcess
from tests.tcp_relay import TcpRelay

SECOND_ROUTER = "router-2"
REDIS = "Redis"
# Who finds others, or is found, through Redis: all but the kvstore, whose Redis tier has an edge of its own.
EVERY_SERVICE = "services"
# Fewer pages than the conversations have: of a device, of the kvstore's memory and of its disk.
_PAGE_BYTES = 131_072
_DEVICE_PAGES, _RAM_PAGES, _DISK_PAGES = 100, 60, 120
_DISK_MIB = 24
_BACK_S = 20.0


class EdgeRelay(TcpRelay):
    """A way to a member, whose port is known only once the stack starts."""

    def __init__(self, member: str, directory: StateDirectory) -> None:
        super().__init__((LOOPBACK, 0))
        self._member, self._directory = member, directory

    def _find_target(self) -> tuple[str, int]:
        state = self._directory.read()
        if state is None or not (port := state.services[self._member].port):
            raise ConnectionRefusedError(self._member)
        return LOOPBACK, port


class Clock:
    """The wall clock of one member's processes, by libfaketime; other clocks of theirs are the machine's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """So far from the machine's clock; processes notice within a second."""
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(f"{seconds:+d}\n")
        temporary.replace(self._file)

    def prefix(self, library: str) -> tuple[str, ...]:
        """Words before a command whose clock this is to be."""
        own = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        return (shutil.which("env") or "/usr/bin/env", *(f"{name}={value}" for name, value in own.items()))


def faketime_library() -> str:
    """The path of libfaketime, which `make chaos` installs; empty where it is not. Debian's own makes Python's
    time.sleep fail; the package on PyPI leaves sleeps alone."""
    return next((str(path) for path in ROOT.glob("build/faketime/**/libfaketime.so.1")), "")


def _remove_faketime_memory() -> None:
    """Delete what libfaketime has left of processes that were killed."""
    for file in Path("/dev/shm").glob("*faketime_*_*"):
        if not psutil.pid_exists(int(file.name.rpartition("_")[2])):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own at the folder, where mounting is allowed; whether it is."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


class TableRig(Rig):
    """A context. `relays` by caller and callee."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.redis = redis
        self.pages = folder / "pages"
        self.relays: dict[tuple[str, str], TcpRelay] = {}
        self.clocks: dict[str, Clock] = {}
        self._own = contextlib.ExitStack()
        self._later = contextlib.AsyncExitStack()
        self.has_own_disk = self._own.enter_context(small_disk(self.pages))
        try:
            super().__init__("cpu", flags=self._flags(), commands=self._commands(folder))
        except BaseException:
            self._own.close()
            raise
        options = [f"--{name}={value}" for name, value in self._router_flags().items()]
        self._second = RouterProcess(options)
        self.envoy: Envoy

    async def __aenter__(self) -> Self:
        await self._later.enter_async_context(self._second)
        http = [int(self.stack.ready.http.rpartition(":")[2]), self._second.http_port]
        grpc = [int(self.stack.grpc.rpartition(":")[2]), self._second.grpc_port]
        self.envoy = await self._later.enter_async_context(envoy_before(http, grpc_ports=grpc))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._own:
            await self._later.aclose()
            await super().__aexit__(kind, error, trace)
        _remove_faketime_memory()

    def keep(self, relay: TcpRelay) -> TcpRelay:
        """Keep a relay open until the end of the rig."""
        return self._own.enter_context(relay)

    def targets(self, service: str) -> list[str]:
        """The processes of a service that a fault may befall."""
        own = list(self.stack.spec.members_of(service))
        return [*own, SECOND_ROUTER] if service == "router" else own

    def process(self, target: str) -> ProcessId:
        """The present process of a target."""
        if target != SECOND_ROUTER:
            return self.service(target).process
        assert self._second.process is not None
        return ProcessId.of(self._second.process.pid)

    @property
    def router_logs(self) -> tuple[Path, Path]:
        """The log files of both routers."""
        return self.stack.directory.log("router"), self._second.log_file

    def relays_between(self, caller: str, callee: str) -> dict[str, TcpRelay]:
        """The relays between two services, by what they connect."""
        return {
            f"{one} and {other}": relay
            for (one, other), relay in self.relays.items()
            if (service_of(one), service_of(other)) == (caller, callee)
        }

    async def healthy(self) -> set[str]:
        """As both routers see it; nobody is, to a router that does not answer."""
        try:
            seen = [await super().healthy()]
            async with httpx.AsyncClient(base_url=self._second.http, trust_env=False, timeout=LIMIT_S) as client:
                seen.append(await self.seen_by(client))
        except httpx.TransportError:
            return set()
        return set.intersection(*seen)

    async def is_whole(self) -> bool:
        """Whether every member serves, both routers know, and Envoy sends requests to both. A second router that has
        ended is started again."""
        if self._second.ended:
            await self._second.start()
        return await super().is_whole() and await self.envoy.healthy() == len(self.targets("router"))

    async def back_s(self) -> float:
        """How long it takes until no page and no lease is held. Fails at a limit."""
        began = time.monotonic()
        await asyncio.to_thread(self.wait_pages_back, _BACK_S)
        back = await until(self, lambda stats: not stats.leases and not stats.pending_puts, _BACK_S)
        assert back, f"the kvstore keeps leases or puts: {kv_stats(self)}"
        return time.monotonic() - began

    def _relay(self, caller: str, callee: str, relay: TcpRelay) -> str:
        """Put a relay on an edge; returns where the caller reaches the callee."""
        self.relays[caller, callee] = self._own.enter_context(relay)
        return f"{LOOPBACK}:{relay.port}"

    def _flags(self) -> dict[str, dict[str, str | bool]]:
        directory = StateDirectory(f"chaos-{os.getpid()}")
        target = (LOOPBACK, self.redis.port)
        shared = self._relay(EVERY_SERVICE, REDIS, TcpRelay(target))
        self._discovery = f"redis://{shared}/0"
        found = {"discovery": f"{self._discovery}?ttl_s=3&poll_s=0.3"}
        flags: dict[str, dict[str, str | bool]] = {
            "worker": {"kv-cache-memory-bytes": str(_DEVICE_PAGES * _PAGE_BYTES)},
            # A lookup whose answer is lost leaves a lease, which ends by its time.
            "scheduler": {**found, "kvstore-lease-ms": "2000"},
            "tokenizer": {**found},
            "router": {**self._router_flags()},
            "kvstore": {
                **found,
                "ram-bytes": str(_RAM_PAGES * _PAGE_BYTES),
                "disk-path": str(self.pages),
                "disk-bytes": str(_DISK_PAGES * _PAGE_BYTES),
                "disk-keep-free-bytes": "0",
                "disk-retry-s": "0.3",
                "redis-url": f"redis://{self._relay('kvstore', REDIS, TcpRelay(target))}/0",
                "redis-ttl-s": "60",
                "redis-timeout-ms": "200",
                "redis-retry-s": "0.3",
                "advertise": self._relay("router", "kvstore", EdgeRelay("kvstore", directory)),
            },
        }
        for number in (1, 2):
            worker, scheduler, tokenizer = f"worker-{number}", f"scheduler-{number}", f"tokenizer-{number}"
            flags[worker] = {"kvstore": self._relay(worker, "kvstore", EdgeRelay("kvstore", directory))}
            flags[scheduler] = {
                "advertise": self._relay("router", scheduler, EdgeRelay(scheduler, directory)),
                "worker": self._relay(scheduler, worker, EdgeRelay(worker, directory)),
                "kvstore": self._relay(scheduler, "kvstore", EdgeRelay("kvstore", directory)),
            }
            flags[tokenizer] = {"advertise": self._relay("router", tokenizer, EdgeRelay(tokenizer, directory))}
        return flags

    def _router_flags(self) -> dict[str, str]:
        return {
            "discovery": f"{self._discovery}?ttl_s=3&poll_s=0.3",
            "redis": self._discovery,
            "drain-delay-s": "1.5",
        }

    def _commands(self, folder: Path) -> dict[str, tuple[str, ...]]:
        """A clock of its own before each member's program, where libfaketime is installed."""
        library = faketime_library()
        if not library:
            return {}
        commands = dict[str, tuple[str, ...]]()
        for service in SERVICES:
            names = [f"{service}-{number}" for number in (1, 2)]
            for name in names if service in ("worker", "scheduler", "tokenizer") else [service]:
                self.clocks[name] = Clock(folder / f"{name}.clock")
                program = (sys.executable, "-m", f"quire_{service}")
                commands[name] = (*self.clocks[name].prefix(library), *program)
        return commands
