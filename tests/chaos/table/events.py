"""Events: the faults that a row of the table makes. Each is a context: the fault comes at its beginning, and what lasts
is mended at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import psutil
from redis import Redis

from quire import AsyncClient, QuireError, SamplingParams
from quire_common.pages import HEADER_BYTES
from quire_kvstore.tiers.redis_backend import PREFIX
from tests.chaos.spoil import spoil_files, spoil_memory, spoilt
from tests.chaos.table.table_rig import TableRig
from tests.tcp_relay import TcpRelay

_PIECE_BYTES = 1 << 20
_FOUND_LIMIT_S = 20.0
_POLL_S = 0.05


class Event(Protocol):
    """`at` makes it happen, and yields what the fault has hit. What it chooses depends on `rng` alone."""

    def at(self, rig: TableRig, rng: random.Random) -> contextlib.AbstractAsyncContextManager[str]: ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL of one process; its supervisor starts another."""

    service: str
    number: signal.Signals = signal.SIGKILL

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        target = rng.choice(rig.targets(self.service))
        assert rig.process(target).signal(self.number)
        yield target


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of one process, and SIGCONT."""

    service: str

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        target = rng.choice(rig.targets(self.service))
        process = rig.process(target)
        assert process.signal(signal.SIGSTOP)
        try:
            yield target
        finally:
            process.signal(signal.SIGCONT)


@dataclass(frozen=True)
class Edge:
    """What one edge does to all that passes between a caller and a callee: a mode of the relay there. `cut`: all
    connections end."""

    caller: str
    callee: str
    mode: str
    delay_s: float = 0.1

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        relays = rig.relays_between(self.caller, self.callee)
        names = rng.sample(sorted(relays), len(relays))
        if not _open_connections(relays):
            # The pages of all prompts so far may be known everywhere: workers then move none, and have no connection to
            # the kvstore.
            async with _new_prompts(httpx.URL(rig.stack.ready.http).port, rng):
                await _wait_until_found(lambda: _open_connections(relays), f"a connection of {' or '.join(names)}")
        name = next(name for name in names if relays[name].open)
        relay = relays[name]
        if self.mode == "cut":
            relay.hang_up()
            yield name
            return
        relay.set_mode(self.mode, self.delay_s)
        try:
            yield name
        finally:
            relay.set_mode("pass")


@dataclass(frozen=True)
class FullDisk:
    """The file system of the kvstore's pages has no room left."""

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        assert rig.has_own_disk, "this machine allows no mount of a small file system"
        ballast = rig.pages / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_PIECE_BYTES))
        try:
            yield f"{ballast.stat().st_size >> 20} MiB"
        finally:
            ballast.unlink()


@dataclass(frozen=True)
class MemoryLimit:
    """One process gets no more address space than it has."""

    service: str

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        target = rng.choice(rig.targets(self.service))
        process = rig.process(target)
        limit = psutil.Process(process.pid).memory_info().vms
        _, most = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, most))
        try:
            yield target
        finally:
            if process.alive():
                resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))


@dataclass(frozen=True)
class ClockStep:
    """The wall clock of one member steps, and steps back."""

    service: str
    seconds: int

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        clocks = rig.clocks
        assert clocks, "libfaketime is not in build/faketime, where `make chaos` installs it"
        target = rng.choice([name for name in rig.targets(self.service) if name in clocks])
        clocks[target].set(self.seconds)
        try:
            yield target
        finally:
            clocks[target].set(0)


@dataclass(frozen=True)
class RedisFault:
    """`killed`, and started again; `hung`, by SIGSTOP; `emptied`, while it serves."""

    kind: str

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        match self.kind:
            case "killed":
                rig.redis.stop()
                try:
                    yield ""
                finally:
                    await asyncio.to_thread(rig.redis.start)
            case "hung":
                rig.redis.freeze()
                try:
                    yield ""
                finally:
                    rig.redis.thaw()
            case _:
                with Redis.from_url(rig.redis.url) as redis:
                    redis.flushall()
                yield ""


@dataclass(frozen=True)
class SpoiltPages:
    """Bytes of the kvstore's pages change, or files are cut short: in `memory`, on `disk` or in `redis`."""

    medium: str

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        count = await _wait_until_found(lambda: self._spoil(rig, rng), f"a page in {self.medium}")
        yield f"{count} pages"

    def _spoil(self, rig: TableRig, rng: random.Random) -> int:
        """Returns how many pages it has spoilt."""
        match self.medium:
            case "memory":
                return spoil_memory(rig.process("kvstore").pid)
            case "disk":
                return spoil_files(_page_files(rig.pages), rng)
            case _:
                return _spoil_redis(rig.redis.url)


@dataclass(frozen=True)
class LostClients:
    """Four more clients, whose answers have begun. They vanish, with a reset of their connections; or are
    `half_open`: gone, without a word to the routers, whose connections stay."""

    half_open: bool

    @asynccontextmanager
    async def at(self, rig: TableRig, rng: random.Random) -> AsyncIterator[str]:
        http, grpc = (httpx.URL(rig.stack.ready.http).port, httpx.URL(f"http://{rig.stack.grpc}").port)
        assert http and grpc
        relays = [rig.keep(TcpRelay(("127.0.0.1", port))) for port in (http, grpc)]
        answered = [asyncio.Event() for _ in range(4)]
        prompt = f"LOST {rng.random()}:"
        clients = [
            asyncio.create_task(_hear_http(relays[0].port, prompt, answered[0])),
            asyncio.create_task(_hear_http(relays[0].port, prompt, answered[1])),
            asyncio.create_task(_hear_grpc(relays[1].port, prompt, answered[2])),
            asyncio.create_task(_hear_grpc(relays[1].port, prompt, answered[3])),
        ]
        try:
            async with asyncio.timeout(_FOUND_LIMIT_S):
                await asyncio.gather(*(each.wait() for each in answered))
            for relay in relays:
                relay.set_mode("held")
                if not self.half_open:
                    relay.hang_up(reset=True)
            yield "4 clients"
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


_LONG = 200


async def _wait_until_found(look: Callable[[], int], what: str) -> int:
    """Look until there is one; return how many there are. Raises AssertionError at a limit."""
    deadline = time.monotonic() + _FOUND_LIMIT_S
    while not (count := await asyncio.to_thread(look)):
        assert time.monotonic() < deadline, f"there was no such thing: {what}"
        await asyncio.sleep(_POLL_S)
    return count


def _open_connections(relays: Mapping[str, TcpRelay]) -> int:
    return sum(relay.open for relay in relays.values())


@asynccontextmanager
async def _new_prompts(port: int | None, rng: random.Random) -> AsyncIterator[None]:
    """Ask prompts that nobody has asked before, one after the other, until the block ends."""
    assert port

    async def ask() -> None:
        while True:
            await _hear_http(port, f"NEW {rng.random()}:", asyncio.Event())
            await asyncio.sleep(_POLL_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _hear_http(port: int, prompt: str, answered: asyncio.Event) -> None:
    body = {"prompt": prompt, "max_tokens": _LONG, "temperature": 0, "ignore_eos": True, "stream": True}
    client = httpx.AsyncClient(trust_env=False, timeout=None)
    with contextlib.suppress(httpx.HTTPError):
        async with client, client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                answered.set()


async def _hear_grpc(port: int, prompt: str, answered: asyncio.Event) -> None:
    params = SamplingParams(temperature=0, max_tokens=_LONG, ignore_eos=True)
    with contextlib.suppress(QuireError):
        async with AsyncClient(f"127.0.0.1:{port}", reconnect_s=0) as client:
            async for _ in client.generate(prompt, params):
                answered.set()


def _page_files(folder: Path) -> list[Path]:
    return [Path(base, name) for base, _, names in os.walk(folder) for name in names if name.endswith(".page")]


def _spoil_redis(url: str) -> int:
    """Spoil the body of every page; returns how many there were."""
    count = 0
    with Redis.from_url(url) as redis:
        for key in redis.scan_iter(match=PREFIX + b"*", count=1000):
            page = redis.get(key)
            if isinstance(page, bytes):
                redis.set(key, page[:HEADER_BYTES] + spoilt(page[HEADER_BYTES:]), keepttl=True)
                count += 1
    return count
