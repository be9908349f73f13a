"""The gRPC wiring of the scheduler: which servicer is on the port, and what the service does at start, drain and
close."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_common.config import split_address
from quire_common.errors import ConfigError, as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.metrics import registry
from quire_common.telemetry.vllm_names import add_compatible_names
from quire_scheduler import metrics
from quire_scheduler.service.engine import Engine
from quire_scheduler.service.kv_events.event_pump import make_event_pump
from quire_scheduler.service.kvstore_client import KvstoreClient
from quire_scheduler.service.worker_link import WorkerLink
from quire_scheduler.servicer import SchedulerServicer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

    from quire_common.serving.server import BoundServer
    from quire_scheduler.config import SchedulerConfig

log = get_logger(__name__)


class SchedulerService:
    """Wires the parts of the scheduler for one server process. Making it opens the sockets of KV events, if these are
    on, and raises ConfigError without --worker, or for an address or a KV events option that cannot be used."""

    name = "scheduler"

    def __init__(self, config: SchedulerConfig, bound: BoundServer) -> None:
        if not config.worker:
            raise ConfigError(
                "WORKER_MISSING", "The scheduler has no worker.", "Give --worker host:port.", param="worker"
            )
        add_compatible_names(registry, config.metrics_compat, self.name)
        split_address(config.worker, "--worker")
        if config.kvstore:
            split_address(config.kvstore, "--kvstore")
        self._kvstore = KvstoreClient(config) if config.kvstore else None
        self._engine = Engine(config, self._kvstore, bound.instance)
        self.kv_events = make_event_pump(config, self._engine)
        self._set_serving = bound.set_serving
        self._link = WorkerLink(config, self._engine, self._attached)
        self._servicer = SchedulerServicer(self._engine, bound.instance)
        self._tasks: list[asyncio.Task[None]] = []
        self._fail = bound.fail
        bound.when_leaving(self._engine.leave)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Put the Scheduler contract on the server."""
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self._servicer, server)
        return [scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name]

    async def start(self) -> None:
        """Start the worker's link, the clock and the event pump, and return when the worker is ready. Loading may take
        minutes, and WatchLoad tells of it meanwhile."""
        self._tasks = [asyncio.ensure_future(self._link.run()), asyncio.ensure_future(self._engine.tick())]
        if self.kv_events is not None:
            self._tasks.append(asyncio.ensure_future(self.kv_events.run()))
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        await self._link.wait_ready()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until the admitted ones have finished and no transfer is open. After
        `timeout_s`, the requests that remain are failed, and the transfers ended."""
        await self._engine.drain(timeout_s)

    async def close(self) -> None:
        """Cancel the tasks and wait for them, send the KV events that the publisher has taken, give the kvstore's
        leases back and close all channels. An error by which a task ended is ignored here. Requests that still run end
        without a word to their sessions."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            # What else it ended by was told when it did.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        if self.kv_events is not None:
            self.kv_events.close()
        await self._engine.close()
        await self._link.close()
        if self._kvstore is not None:
            await self._kvstore.close()

    def _attached(self, up: bool) -> None:
        """Set the service as serving or not and, if `up`, label its metrics with the worker's model."""
        if up:
            metrics.name_model(self._engine.model().name)
        self._set_serving(up)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Log the error and make the whole service fail if its link, clock or event pump broke; a cancelled task is
        ignored. A scheduler without them would keep its requests for ever."""
        if task.cancelled():
            return
        try:
            task.result()
        except Exception as error:
            log.exception("a task of the scheduler broke")
            self._fail(as_quire_error(error))
