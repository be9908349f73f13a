"""BoundedProtocol: uvicorn's httptools protocol, with bounds on the bytes and the time of a request's head. It also
lets a response write body chunks directly to the connection, without ASGI."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire_router import metrics

if TYPE_CHECKING:
    from starlette.types import Scope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CYCLE = "quire.cycle"
MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """A connection of uvicorn. If it sends no complete head within the bounds of time and size, it is answered 400 and
    closed; while the answer to an earlier request is under way, that answer becomes the last one instead. A connection
    beyond `max_connections` is closed at once."""

    max_connections = 0
    """0 is without limit."""
    last_answers = False
    """Whether each answer is the last one of its connection."""

    @classmethod
    def begin_last_answers(cls) -> None:
        """From now on, each answer whose head has not been sent says `Connection: close`, and is the last answer of its
        connection."""
        cls.last_answers = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower, as in uvicorn
        """Close a connection beyond `max_connections` (0: no limit) at once and count it. Otherwise start the timer of
        its first head, 30 s. For later heads, uvicorn's keep-alive timeout runs until they begin."""
        super().connection_made(transport)
        if 0 < self.max_connections < len(self.connections):
            metrics.http_refused.labels("TOO_MANY_CONNECTIONS").inc()
            transport.abort()
            return
        self._start_head()

    def data_received(self, data: bytes) -> None:
        """Pass a piece of data on to the parser. If the head is not complete when more than 64 KiB have come, answer
        400 and close the connection."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._end_head()
            self._refuse("HEAD_TOO_LARGE", "Request head too large.")

    def on_message_begin(self) -> None:
        """Start the timer of a head. The first head of a connection has its timer since the connection was made."""
        super().on_message_begin()
        if not self._in_head:
            self._start_head()

    def on_headers_complete(self) -> None:
        """Stop the head's timer, and store the request's cycle in its scope, for `chunk_writer`. After
        `begin_last_answers`, the connection closes after this answer."""
        self._end_head()
        super().on_headers_complete()
        if self.last_answers:
            self.cycle.keep_alive = False
        # Its own cycle: with pipelining, the connection's may be that of a later request.
        cast("Scope", self.cycle.scope)[_CYCLE] = self.cycle

    def make_last_answer(self) -> None:
        """Make the answer that is under way the last answer of the connection, unless its head has been sent. That head
        has invited the client to send its next request on this connection, and the request would be lost."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Answer 400 with the text `msg`, and close the connection. But if an answer is under way to a request that has
        come completely, write nothing into it: that answer becomes the last one, and no more is read."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            super().send_400_response(msg)
            return
        cycle.keep_alive = False
        self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the head's timer."""
        self._end_head()
        super().connection_lost(exc)

    def _start_head(self) -> None:
        """Begin to count the bytes of a head, and start the timer that refuses it unless it is complete within
        HEAD_TIMEOUT_S."""
        self._in_head, self._head_bytes = True, 0
        too_slow = "HEAD_TOO_SLOW", "Request head too slow."
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, *too_slow)

    def _end_head(self) -> None:
        """Stop counting the head's bytes, and cancel its timer."""
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, cause: str, reason: str) -> None:
        """Count the refusal under `cause`, and call `send_400_response` with the text `reason`. Does nothing if the
        connection is closing already."""
        if not self.transport.is_closing():
            metrics.http_refused.labels(cause).inc()
            self.send_400_response(reason)


class ChunkWriter:
    """Writes chunks of one response's body after its head has been sent. The end of the body goes through ASGI."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def full(self) -> bool:
        """Whether so many bytes wait to be sent that the caller should first await `drain`."""
        return self._flow.write_paused and not self._cycle.disconnected

    async def drain(self) -> None:
        """Return when the client has taken enough bytes for more to be written, or has left."""
        await self._flow.drain()

    def abort(self) -> None:
        """Close the connection at once, and drop its unsent data."""
        self._cycle.transport.abort()

    def write(self, body: bytes) -> None:
        """Write `body` as one HTTP chunk. Does nothing if it is empty or the client has left."""
        if body and not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """Return the writer of a response whose head has been sent. A second call for the same request returns None. Also
    returns None if the response is not chunked, or if a server other than uvicorn runs the application."""
    cycle: RequestResponseCycle | None = scope.pop(_CYCLE, None)
    return ChunkWriter(cycle) if cycle is not None and cycle.chunked_encoding else None
