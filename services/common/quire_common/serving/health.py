"""Health of a service: whether its process answers, and whether the service can do its work.

grpc.health.v1 answers both questions. The name `liveness` is SERVING from the opening of the port to the end of the
process; a process that does not answer must be restarted. The name `readiness`, the empty name and the names of gRPC
services follow `Readiness`. A service that says NOT_SERVING gets no requests, but must not be restarted for this
reason.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Final

from grpc_health.v1 import health, health_pb2

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
# A probe that waits longer has given up.
_LOOP_LIMIT_S = 2.0
_Status = health_pb2.HealthCheckResponse


class Readiness:
    """A service is ready if its start has succeeded, its dependencies are available, and its stop has not begun. May be
    read from any thread."""

    def __init__(self) -> None:
        self._started = False
        self._up = True
        self._leaving = False

    @property
    def ready(self) -> bool:
        """Whether the service is ready."""
        return self._started and self._up and not self._leaving

    @property
    def status(self) -> int:
        """Readiness as a status of grpc.health.v1."""
        return int(_Status.SERVING if self.ready else _Status.NOT_SERVING)

    def start(self) -> None:
        """Note that the start has succeeded."""
        self._started = True

    def set_up(self, up: bool) -> bool:
        """Note whether the service's dependencies are available. Returns whether that has changed."""
        news, self._up = up != self._up, up
        return news

    def leave(self) -> None:
        """Note that the stop has begun."""
        self._leaving = True


class AioHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc publishes no types for it
    """grpc.health.v1 of an asyncio service; belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.readiness = Readiness()
        self._names: Sequence[str] = ()
        self._telling: set[asyncio.Task[None]] = set()

    async def watch(self, names: Sequence[str]) -> None:
        """From now on, answer health checks for these gRPC services, the empty name and `readiness` by the readiness,
        and for `liveness` with SERVING."""
        self._names = (*names, "", READINESS)
        await self.set(LIVENESS, _Status.SERVING)
        await self._tell()

    async def ready(self) -> None:
        """Note that the start has succeeded, and report the readiness under all names."""
        self.readiness.start()
        await self._tell()

    async def leave(self) -> None:
        """Note that the stop has begun, and report NOT_SERVING under all names but `liveness`."""
        self.readiness.leave()
        await self._tell()

    def set_serving(self, up: bool) -> None:
        """Note whether the service's dependencies are available. A change is reported by a task in this loop; before
        the start has succeeded and after the stop has begun, the report stays NOT_SERVING."""
        if not self.readiness.set_up(up):
            return
        task = asyncio.ensure_future(self._tell())
        self._telling.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        for name in self._names:
            await self.set(name, self.readiness.status)


class SyncHealth(health.HealthServicer):  # type: ignore[misc]  # grpc publishes no types for it
    """grpc.health.v1 of a threaded service. Methods may run in any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.readiness = Readiness()
        self._names: Sequence[str] = ()
        self._telling = threading.Lock()

    def watch(self, names: Sequence[str]) -> None:
        """From now on, answer health checks for these gRPC services, the empty name and `readiness` by the readiness,
        and for `liveness` with SERVING."""
        self._names = (*names, "", READINESS)
        self.set(LIVENESS, _Status.SERVING)
        self._tell()

    def ready(self) -> None:
        """Note that the start has succeeded, and report the readiness under all names."""
        self.readiness.start()
        self._tell()

    def leave(self) -> None:
        """Note that the stop has begun, and report NOT_SERVING under all names but `liveness`."""
        self.readiness.leave()
        self._tell()

    def _tell(self) -> None:
        """Report the present readiness for all watched names."""
        with self._telling:
            for name in self._names:
                self.set(name, self.readiness.status)


def loop_answers(loop: asyncio.AbstractEventLoop, limit_s: float = _LOOP_LIMIT_S) -> bool:
    """Return whether the event loop runs a callback within `limit_s`; False also for a closed loop. Called, and blocks,
    in another thread than the loop's."""
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # it is closed
        return False
    return answered.wait(limit_s)
