"""Sends a generation's events to its client as they come. It knows neither formats nor the contents of frames.

There are two paths. The plain path awaits deltas and sends each through ASGI. If no event needs an await, the fast path
runs in callbacks of the event loop: all deltas of one turn become one write to the connection, and no task wakes for a
token. Both paths write the same bytes, which a test compares.

A client that waits for long gets a comment from time to time, so that no proxy closes the connection as idle.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_router.front.http.protocol import chunk_writer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Scope, Send

    from quire_router.front.http.formats.answer_format import AnswerFormat
    from quire_router.front.http.protocol import ChunkWriter
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


PING = b": ping\n\n"


async def write_stream(scope: Scope, send: Send, generation: Generation, answer: AnswerFormat, ping_s: float) -> None:
    """Send a generation's events to its client until the generation has ended. Raises QuireError for a failure before
    the head was sent; a later failure becomes the stream's last event. Before the last event of any other stream,
    `answer.settle` is called.

    The head is sent with the first deltas, so that an early failure still gets its HTTP status. But if nothing was sent
    for `ping_s` seconds (0: never), a comment is sent, even before the first deltas; on the fast path, it may come up
    to `ping_s` later. While the client's buffer is full, writing waits and new deltas are joined; no other client
    waits.
    """
    started = False

    async def ping() -> None:
        """Send a comment; before the first one, send the head if it has not been sent."""
        nonlocal started
        if not started:
            started = True
            await _send_head(send)
        await send({"type": "http.response.body", "body": PING, "more_body": True})

    try:
        deltas = await _next_deltas(generation, ping, ping_s)
    except QuireError as error:
        if not started:
            raise
        await send({"type": "http.response.body", "body": answer.opening() + answer.failed(error)})
        return
    if not started:
        await _send_head(send)
    frames = answer.opening() + b"".join(map(answer.frame, deltas))
    if generation.running:
        await send({"type": "http.response.body", "body": frames, "more_body": True})
        connection = chunk_writer(scope) if generation.listens else None
        try:
            if connection is not None:
                frames = await _Pump(generation, answer, connection, ping_s).run()
            else:
                frames = await _relay(send, generation, answer, ping, ping_s)
        except QuireError as error:
            await send({"type": "http.response.body", "body": answer.failed(error)})
            return
    closing = answer.closing()
    await answer.settle()
    await send({"type": "http.response.body", "body": frames + closing})


async def _send_head(send: Send) -> None:
    """Send the head of an event stream."""
    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})


async def _relay(
    send: Send, generation: Generation, answer: AnswerFormat, ping: Callable[[], Awaitable[None]], ping_s: float
) -> bytes:
    """Send deltas through ASGI as they come, with a comment while none come for `ping_s`. Returns the frames of the
    last deltas, which are not sent yet. Raises the QuireError that ended the job."""
    while True:
        frames = b"".join(map(answer.frame, await _next_deltas(generation, ping, ping_s)))
        if not generation.running:
            return frames
        await send({"type": "http.response.body", "body": frames, "more_body": True})


async def _next_deltas(generation: Generation, ping: Callable[[], Awaitable[None]], ping_s: float) -> list[Delta]:
    """Wait for the next deltas and return them. Each time that `ping_s` seconds pass meanwhile (0: never), call
    `ping`."""
    if not ping_s:
        return await generation.next_deltas()
    if not generation.listens:
        return await _next_deltas_uncancelled(generation, ping, ping_s)
    while True:
        try:
            async with asyncio.timeout(ping_s):
                return await generation.next_deltas()
        except TimeoutError:
            await ping()


async def _next_deltas_uncancelled(
    generation: Generation, ping: Callable[[], Awaitable[None]], ping_s: float
) -> list[Delta]:
    """Do `_next_deltas` for a job with logprobs or prompt logprobs. No ping may cancel `next_deltas` here: the deltas
    would be lost if `next_deltas` was fetching the bytes of their tokens. If the caller is cancelled, so is
    `next_deltas`."""
    task = asyncio.ensure_future(generation.next_deltas())
    try:
        while not (await asyncio.wait((task,), timeout=ping_s))[0]:
            await ping()
        return task.result()
    finally:
        task.cancel()


class _Pump:
    """Writes deltas to the connection from callbacks of the event loop, so that no task wakes for a delta."""

    def __init__(self, generation: Generation, answer: AnswerFormat, connection: ChunkWriter, ping_s: float) -> None:
        self._generation = generation
        self._frame = answer.frame
        self._connection = connection
        self._last = b""
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[None] = self._loop.create_future()
        self._ping_s = ping_s
        self._wrote = True

    async def run(self) -> bytes:
        """Write deltas to the connection as they come, and wait while the client's buffer is full. Returns the frames
        of the last deltas, which are not sent yet. Raises the QuireError that ended the job."""
        if self._ping_s:
            self._timer = self._loop.call_later(self._ping_s, self._ping)
        try:
            while True:
                self._generation.call_when_ready(self._on_deltas)
                await self._turn
                if not self._generation.running:
                    return self._last
                # The client's buffer is full.
                await self._connection.drain()
                self._turn = self._loop.create_future()
        finally:
            if self._ping_s:
                self._timer.cancel()

    def _ping(self) -> None:
        """Send a comment if nothing was written since the last call and the client's buffer has room. Calls itself
        again after `ping_s` seconds."""
        if not self._wrote and not self._connection.full:
            self._connection.write(PING)
        self._wrote = False
        self._timer = self._loop.call_later(self._ping_s, self._ping)

    def _on_deltas(self) -> None:
        """Write all new deltas at once, and register this callback for the next ones. At the end, on an error, and
        while the client's buffer is full, wake `run` instead."""
        if self._turn.done():  # the request was cancelled
            return
        if self._connection.full:
            self._turn.set_result(None)
            return
        try:
            frames = b"".join(map(self._frame, self._generation.take_deltas()))
        except Exception as error:
            self._turn.set_exception(error)
            return
        if self._generation.running:
            self._connection.write(frames)
            self._wrote = True
            self._generation.call_when_ready(self._on_deltas)
        else:
            self._last = frames
            self._turn.set_result(None)
