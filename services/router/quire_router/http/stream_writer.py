"""A generation's events to its client as they come. Knows neither formats nor what is in a frame.

The plain way awaits news and sends each through ASGI. Where nothing has to be fetched for an event, the loop calls back
instead: all news of one turn become one write to the connection, and no task wakes for a token. Both write the same
bytes; a test compares them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_router.http.protocol import chunk_writer

if TYPE_CHECKING:
    from starlette.types import Scope, Send

    from quire_router.core.generation import Generation
    from quire_router.http.answer_format import AnswerFormat
    from quire_router.http.protocol import ChunkWriter

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def write_stream(scope: Scope, send: Send, generation: Generation, answer: AnswerFormat) -> None:
    """Nothing is sent before the first news, so that an early failure still gets its HTTP status.

    Writing waits while the client's buffer is full; the news of that time are joined, and nobody else waits.
    """
    deltas = await generation.news()
    await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
    frames = answer.opening() + b"".join(map(answer.frame, deltas))
    if generation.running:
        await send({"type": "http.response.body", "body": frames, "more_body": True})
        connection = chunk_writer(scope) if generation.listens else None
        try:
            if connection is not None:
                frames = await _Pump(generation, answer, connection).run()
            else:
                frames = await _relay(send, generation, answer)
        except QuireError as error:
            await send({"type": "http.response.body", "body": answer.failed(error)})
            return
    closing = answer.closing()
    await answer.settle()
    await send({"type": "http.response.body", "body": frames + closing})


async def _relay(send: Send, generation: Generation, answer: AnswerFormat) -> bytes:
    """The plain way: until the last news, whose frames are returned unsent."""
    while True:
        frames = b"".join(map(answer.frame, await generation.news()))
        if not generation.running:
            return frames
        await send({"type": "http.response.body", "body": frames, "more_body": True})


class _Pump:
    """The way without tasks, until the last news, whose frames are returned unsent."""

    def __init__(self, generation: Generation, answer: AnswerFormat, connection: ChunkWriter) -> None:
        self._generation = generation
        self._frame = answer.frame
        self._connection = connection
        self._last = b""
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> bytes:
        """Raises the QuireError that ended the job."""
        while True:
            self._generation.call_once(self._on_news)
            await self._turn
            if not self._generation.running:
                return self._last
            # The client's buffer is full.
            await self._connection.drain()
            self._turn = asyncio.get_running_loop().create_future()

    def _on_news(self) -> None:
        if self._turn.done():  # the request was cancelled
            return
        if self._connection.full:
            self._turn.set_result(None)
            return
        try:
            frames = b"".join(map(self._frame, self._generation.news_now()))
        except Exception as error:
            self._turn.set_exception(error)
            return
        if self._generation.running:
            self._connection.write(frames)
            self._generation.call_once(self._on_news)
        else:
            self._last = frames
            self._turn.set_result(None)
