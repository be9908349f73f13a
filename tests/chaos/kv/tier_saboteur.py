"""TierSaboteur: does harm to the kvstore and to what it stands on, while a stack is under load."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.chaos.rig import LIMIT_S, POLL_S, Rig
from tests.chaos.spoil import spoil_files, spoil_memory
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer

_COUNTED = ("hits", "stored", "corrupt", "dropped", "errors", "evictions")


class TierSaboteur:
    """Its choices depend on the seed alone. `folder` is the disk tier's; Redis is reached through the proxy."""

    def __init__(self, rig: Rig, folder: Path, server: RedisServer, proxy: RedisProxy, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self._rig = rig
        self._folder = folder
        self._server = server
        self._proxy = proxy
        self._rng = random.Random(seed)
        self._seen: dict[int, Any] = {}

    async def strike(self, *, kill: bool) -> None:
        """One fault; the kvstore dies only where it may."""
        faults = [self._stop_redis, self._disturb_redis, self._spoil_disk, self._spoil_memory]
        await self._rng.choice([*faults, *([self._kill] * 2 if kill else [])])()

    async def look(self) -> None:
        """Remember the statistics of the present life, for they end with it. A task's work."""
        while True:
            with contextlib.suppress(grpc.RpcError):
                stats = await asyncio.to_thread(self._stats)
                self._seen[stats.epoch.boot_id] = stats
            await asyncio.sleep(0.5)

    async def wait_at_rest(self) -> None:
        """Nobody holds a lease, and no put is open."""
        deadline, stats = time.monotonic() + LIMIT_S, None
        while stats is None or stats.leases or stats.pending_puts:
            assert time.monotonic() < deadline, f"the kvstore keeps something: {stats}"
            with contextlib.suppress(grpc.RpcError):
                stats = await asyncio.to_thread(self._stats)
            await asyncio.sleep(POLL_S)

    def totals(self) -> dict[str, Counter[str]]:
        """Over all lives, by medium."""
        found: dict[str, Counter[str]] = {}
        for stats in self._seen.values():
            for tier in stats.tiers:
                found.setdefault(tier.medium, Counter()).update({name: getattr(tier, name) for name in _COUNTED})
        return found

    async def _kill(self) -> None:
        self._note("kvstore killed")
        process = self._rig.service("kvstore").process
        process.signal(signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while self._rig.service("kvstore").process == process or not self._rig.serves("kvstore"):
            assert time.monotonic() < deadline, "the kvstore does not come back"
            await asyncio.sleep(POLL_S)

    async def _stop_redis(self) -> None:
        self._note("Redis stopped")
        self._server.stop()
        await asyncio.sleep(self._rng.uniform(0.5, 3.0))
        await asyncio.to_thread(self._server.start)

    async def _disturb_redis(self) -> None:
        mode = self._rng.choice(("silent", "slow", "garbage"))
        self._note(f"Redis {mode}")
        self._proxy.mode = mode
        await asyncio.sleep(self._rng.uniform(0.5, 3.0))
        self._proxy.mode = "pass"

    async def _spoil_disk(self) -> None:
        files = [file for file in self._folder.rglob("*.page") if self._rng.random() < 0.3]
        self._note("files spoilt", spoil_files(files, self._rng))

    async def _spoil_memory(self) -> None:
        with contextlib.suppress(OSError, StopIteration):  # it may have just died
            self._note("pages in memory spoilt", spoil_memory(self._rig.service("kvstore").pid, 0.3, self._rng))

    def _note(self, what: str, count: int = 1) -> None:
        self.faults[what] += count

    def _stats(self) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{self._rig.service('kvstore').port}") as channel:
            return kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.StatsRequest(), timeout=5)
