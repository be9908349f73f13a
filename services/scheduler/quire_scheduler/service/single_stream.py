"""SingleStream: one request per call, for clients that are not routers. Each call has a session of its own with one
handle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_scheduler.service.output_split import PIECE_BYTES, split_outputs
from quire_scheduler.service.session_wire import outputs_to_generated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire.v1 import scheduler_pb2
    from quire_common.sequence import RequestContext, Sequence
    from quire_scheduler.core.outputs import SessionOutputs
    from quire_scheduler.service.engine import Engine

_HANDLE = 0


class SingleStream:
    """The engine's OutputSink for one request. Its queue has no limit, since one request has only so many tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[SessionOutputs] = asyncio.Queue()

    async def run(
        self, context: RequestContext, sequence: Sequence
    ) -> AsyncIterator[scheduler_pb2.GenerateTokensResponse]:
        """Submit the request and yield its outputs until it has finished; those without rows and prompt logprobs are
        left out. A row may have no tokens. Raises the error by which the request is refused or fails; outputs that come
        together with the failure are dropped. If the caller closes the stream early, the request is aborted."""
        session = self._engine.open_session(self)
        try:
            self._engine.submit(session, _HANDLE, context, sequence)
            finished = False
            while not finished:
                outputs = await self._queue.get()
                if outputs.failed:
                    raise outputs.failed[0].error
                for piece in split_outputs(outputs, PIECE_BYTES):
                    if len(piece.handle) or piece.prompt_logprobs:
                        yield outputs_to_generated(piece)
                finished = bool(outputs.finished)
        finally:
            self._engine.close_session(session)

    def deliver(self, outputs: SessionOutputs) -> bool:
        self._queue.put_nowait(outputs)
        return True

    def beat(self) -> None:
        """Do nothing: a call with one request needs no heartbeat."""
