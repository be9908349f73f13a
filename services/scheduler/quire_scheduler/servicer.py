"""The Scheduler contract: one short method per RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from quire_common.credit.hello import epoch_to_pb, model_to_pb
from quire_common.sequence import context_from_pb, sequence_from_pb
from quire_common.ticket import ticket_to_pb
from quire_scheduler.service.load_watch import watch_load
from quire_scheduler.service.page_watch import PageWatches
from quire_scheduler.service.session import Session
from quire_scheduler.service.single_stream import SingleStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire_scheduler.service.engine import Engine


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Errors are raised as QuireError; the interceptor turns them into statuses."""

    def __init__(self, engine: Engine, instance: str) -> None:
        self._engine = engine
        self._instance = instance
        self._watches = PageWatches(engine)

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        async for message in Session(self._engine).run(request_iterator):
            yield message

    async def GenerateTokens(
        self, request: scheduler_pb2.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.GenerateTokensResponse]:
        """Run one request in a session of its own and stream its outputs until it has finished. Raises the QuireError
        by which the request is refused or fails. A cancelled call aborts the request."""
        stream = SingleStream(self._engine)
        async for message in stream.run(context_from_pb(request.context), sequence_from_pb(request.sequence)):
            yield message

    async def GetModelInfo(
        self, request: scheduler_pb2.GetModelInfoRequest, context: Any
    ) -> scheduler_pb2.GetModelInfoResponse:
        """Return the worker's model, and this replica's instance, role and epoch. Raises Unavailable while there is no
        worker."""
        response = scheduler_pb2.GetModelInfoResponse(
            model=model_to_pb(self._engine.model()), instance=self._instance, role=self._engine.roles.role
        )
        if self._engine.core is not None:
            response.epoch.CopyFrom(epoch_to_pb(self._engine.core.hello.epoch))
        return response

    async def WatchLoad(
        self, request: scheduler_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.Load]:
        async for load in watch_load(self._engine, self._instance, request.interval_ms):
            yield load

    async def WatchPages(
        self, request: common_pb2.WatchPagesRequest, context: Any
    ) -> AsyncIterator[common_pb2.PageEvents]:
        async for events in self._watches.watch(request):
            yield events

    async def GetTicket(self, request: scheduler_pb2.GetTicketRequest, context: Any) -> scheduler_pb2.GetTicketResponse:
        return scheduler_pb2.GetTicketResponse(ticket=ticket_to_pb(self._engine.ticket(request.transfer_id)))

    async def Drain(self, request: scheduler_pb2.DrainRequest, context: Any) -> scheduler_pb2.DrainResponse:
        return scheduler_pb2.DrainResponse(aborted=await self._engine.drain(request.timeout_ms / 1000 or None))

    async def SetRole(self, request: scheduler_pb2.SetRoleRequest, context: Any) -> scheduler_pb2.SetRoleResponse:
        former, aborted = await self._engine.set_role(request.role, request.drain_timeout_ms / 1000 or None)
        return scheduler_pb2.SetRoleResponse(former_role=former, aborted=aborted)
