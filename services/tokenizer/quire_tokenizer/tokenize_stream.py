"""TokenizeStream: a router's permanent stream of texts to encode, conversations to render and grammars to compile. Each
request is answered when its result is ready, so a short request does not wait for an earlier long one. This module
knows nothing of the work itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as pb
from quire_common.errors import QuireError, as_quire_error, to_message
from quire_common.telemetry import tracing
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Work = Callable[[pb.TokenizeRequest], Awaitable[pb.TokenizeResponse]]
    Write = Callable[[pb.TokenizeResponse], Awaitable[None]]

log = get_logger(__name__)


class TokenizeStream:
    """One stream. `work` returns the answer to a request, without the request's id, or raises a QuireError that
    concerns only this request."""

    def __init__(self, work: Work, write: Write) -> None:
        self._work = work
        self._write = write
        self._writing = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: AsyncIterator[pb.TokenizeRequest]) -> None:
        """Send an empty message, then start a task for each request, which answers it, and cancel the tasks of requests
        that the peer cancels. The ids of requests that are not answered yet must differ. Returns when the peer has
        closed its side and has all answers. If the connection breaks, all tasks are cancelled."""
        try:
            await self._write(pb.TokenizeResponse())
            async for request in requests:
                if request.cancel:
                    if task := self._tasks.get(request.id):
                        task.cancel()
                else:
                    task = self._tasks[request.id] = asyncio.create_task(self._answer(request))
                    task.add_done_callback(lambda done, number=request.id: self._ended(number, done))  # type: ignore[misc]  # a default binds it
            await self._settled()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await self._settled()

    async def _settled(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, request: pb.TokenizeRequest) -> None:
        """Do the work of a request within its trace, and write its answer or its error to the stream. An error other
        than a QuireError is logged, and the peer gets it as an internal one. A cancelled request gets no answer."""
        context = getattr(request, request.WhichOneof("work") or "encode").context
        with tracing.continued(context):
            try:
                response = await self._work(request)
            except Exception as error:
                if not isinstance(error, QuireError):
                    log.exception("a text could not be worked on")
                response = pb.TokenizeResponse(error=to_message(as_quire_error(error)))
        response.id = request.id
        async with self._writing:  # of one stream, gRPC takes one message at a time
            await self._write(response)

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Forget the task of a request that has ended, and log at debug level an error with which the task failed to
        write its answer."""
        self._tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("an answer found nobody", reason=type(error).__name__)
