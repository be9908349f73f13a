"""BoundedProtocol: uvicorn's httptools protocol, with bounds on the bytes and the time of a request's head, and on the
bytes of its trailers. It also lets a response write body chunks directly to the connection, without ASGI."""

from __future__ import annotations

import asyncio
import enum
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire_router import metrics

if TYPE_CHECKING:
    from starlette.types import Scope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CYCLE = "quire.cycle"
MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
# Of each header beside its name and value: ": " and CRLF.
_SEPARATOR_BYTES = 4
_TOO_LARGE = "HEAD_TOO_LARGE", "Request head too large."
_TOO_SLOW = "HEAD_TOO_SLOW", "Request head too slow."


class _Part(enum.Enum):
    """The part of a request that the connection reads."""

    NONE = enum.auto()
    """The request before has ended, and no further one has begun."""
    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK = enum.auto()
    """The size of a chunk has come, but none of its bytes. After the last chunk, whose size is 0, trailers come."""
    REFUSED = enum.auto()
    """Nothing more is read."""


class _HeadTooLarge(Exception):
    """Stops the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection of uvicorn. If it sends no complete head within the bounds of time and size, it is answered 400 and
    closed; while the answer to an earlier request is under way, that answer becomes the last one instead. Trailers are
    dropped, and have the bound on the size of a head. A connection beyond `max_connections` is closed at once."""

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
        self._part = _Part.HEAD
        self._timer: asyncio.TimerHandle | None = None

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
        """Pass a piece of data on to the parser. Refuse the request if its head or its trailers are not complete when
        more than 64 KiB have come. The piece in which trailers begin does not count, nor does the piece in which a body
        ends and the next head begins."""
        if self._part is _Part.REFUSED:
            return
        if self._part is not _Part.BODY:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._part is not _Part.BODY and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Start the timer of a head. The first head of a connection has its timer since the connection was made."""
        super().on_message_begin()
        if self._part is not _Part.HEAD:
            self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the head. A trailer is dropped: the application may have read the headers already, and a
        proxy in front of the router may not have checked it."""
        if self._part is _Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the head's timer, and store the request's cycle in its scope, for `chunk_writer`. A head of more than
        64 KiB is refused, even if it came in one piece. After `begin_last_answers`, the connection closes after this
        answer."""
        header_bytes = sum(map(len, chain.from_iterable(self.headers))) + _SEPARATOR_BYTES * len(self.headers)
        if len(self.url) + header_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LARGE)
            raise _HeadTooLarge
        super().on_headers_complete()
        self._end_part(_Part.BODY)
        if self.last_answers:
            self.cycle.keep_alive = False
        # Its own cycle: with pipelining, the connection's may be that of a later request.
        cast("Scope", self.cycle.scope)[_CYCLE] = self.cycle

    def on_chunk_header(self) -> None:
        """Begin to count the bytes before the chunk's first byte, or before the end of the trailers."""
        self._part, self._head_bytes = _Part.CHUNK, 0

    def on_body(self, body: bytes) -> None:
        """Pass bytes of the body on."""
        self._part = _Part.BODY
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin to count the bytes of the next head."""
        self._end_part(_Part.NONE)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request. If the answered request has not come completely, its rest has 30 s, since no
        application waits for it any more."""
        super().on_response_complete()
        if self.cycle.response_complete and self._part in (_Part.BODY, _Part.CHUNK) and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def make_last_answer(self) -> None:
        """Make the answer that is under way the last answer of the connection, unless its head has been sent. That head
        has invited the client to send its next request on this connection, and the request would be lost."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Answer 400 with the text `msg`, and close the connection. But write nothing into another answer: if one is
        under way to an earlier request and a head is wrong, that answer becomes the last one. If a body or its trailers
        are wrong and any answer has begun, the connection closes."""
        if self._part is _Part.REFUSED:
            return
        cycle, in_body = self.cycle, self._part in (_Part.BODY, _Part.CHUNK)
        self._end_part(_Part.REFUSED)
        if in_body and (self.pipeline or cycle.response_started):
            self.transport.close()
        elif in_body or cycle is None or cycle.response_complete:
            super().send_400_response(msg)
        else:
            cycle.keep_alive = False
            self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._end_part(_Part.REFUSED)
        super().connection_lost(exc)

    def _start_head(self) -> None:
        """Start the timer that refuses a head unless it is complete within HEAD_TIMEOUT_S."""
        self._part = _Part.HEAD
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, *_TOO_SLOW)

    def _end_part(self, part: _Part) -> None:
        """Go on to `part`: no bytes of it have come, and no timer runs."""
        self._part, self._head_bytes = part, 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, cause: str, reason: str) -> None:
        """Count the refusal under `cause`, and call `send_400_response` with the text `reason`. Does nothing if the
        connection is closing already, or reads no more."""
        if self._part is not _Part.REFUSED and not self.transport.is_closing():
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
