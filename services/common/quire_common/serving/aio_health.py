"""grpc.health.v1 of an asyncio service: NOT_SERVING until its start has succeeded, then what the service says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

_Status = health_pb2.HealthCheckResponse


class AioHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc publishes no types for it
    """The servicer; belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Sequence[str] = ()
        self._ready = False
        self._up = True
        self._telling: set[asyncio.Task[None]] = set()

    async def watch(self, names: Sequence[str]) -> None:
        """Answer for these services, all alike: NOT_SERVING until `ready`."""
        self._names = names
        await self._tell()

    async def ready(self) -> None:
        """The start has succeeded."""
        self._ready = True
        await self._tell()

    def set_serving(self, up: bool) -> None:
        """Note whether the service still serves. Peers are told at once, or when it is ready."""
        if up == self._up:
            return
        self._up = up
        task = asyncio.ensure_future(self._tell())
        self._telling.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        status = _Status.SERVING if self._ready and self._up else _Status.NOT_SERVING
        for name in self._names:
            await self.set(name, status)
