"""Heads and trailers of any size: they are bounded, and trailers are no headers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from quire_router.front.http import protocol
from quire_router.front.http.protocol import MAX_HEAD_BYTES
from quire_router.front.http.server import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send

LIMIT_S = 20.0
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
PIECE = b"x: " + b"y" * 1000 + b"\r\n"


class Echo:
    """Answers each request with its body, and keeps the names of its headers. The path /early is answered first."""

    def __init__(self) -> None:
        self.names: list[list[bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.names.append([name for name, _ in scope["headers"]])
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def connection(app: ASGIApp) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.close()


async def send_on(writer: asyncio.StreamWriter, piece: bytes, limit: int) -> int:
    """Send pieces until the connection ends or `limit` bytes are sent; return how many bytes were."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < limit:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    return sent


@pytest.mark.parametrize("sizes", ((10_000,), (1,)))
async def test_trailers_are_no_headers_of_any_request(sizes: tuple[int, ...]) -> None:
    app = Echo()
    data = CHUNKED + b"3\r\nabc\r\n2;name=value\r\nde\r\n0\r\nAuthorization: Bearer a\r\nX-B: 2\r\n\r\n" + GET
    async with connection(app) as (reader, writer):
        for start in range(0, len(data), sizes[0]):
            writer.write(data[start : start + sizes[0]])
            await asyncio.sleep(0)
        answers = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert answers.count(b"HTTP/1.1 200") == 2 and b"abcde" in answers
    assert app.names == [[b"host", b"transfer-encoding"], [b"host", b"connection"]]


@pytest.mark.parametrize("piece", (PIECE, b"y" * 1000), ids=("many lines", "one line"))
async def test_endless_trailers_are_refused(piece: bytes) -> None:
    async with connection(Echo()) as (reader, writer):
        writer.write(CHUNKED + b"3\r\nabc\r\n0\r\nx: ")
        sent = asyncio.ensure_future(send_on(writer, piece, 64 * MAX_HEAD_BYTES))
        assert (await asyncio.wait_for(reader.readline(), LIMIT_S)).startswith(b"HTTP/1.1 400")
        assert await asyncio.wait_for(sent, LIMIT_S) < 64 * MAX_HEAD_BYTES


async def test_endless_trailers_behind_an_early_answer_close_the_connection() -> None:
    async with connection(Echo()) as (reader, writer):
        writer.write(CHUNKED.replace(b"/", b"/early", 1) + b"0\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        assert await send_on(writer, PIECE, 64 * MAX_HEAD_BYTES) < 64 * MAX_HEAD_BYTES
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b"", "no second answer"


@pytest.mark.parametrize("start", (b"0\r\n", b"5\r\nab"), ids=("trailers", "a body"))
async def test_the_rest_of_an_answered_request_is_bounded_in_time(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    async with connection(Echo()) as (reader, writer):
        writer.write(CHUNKED.replace(b"/", b"/early", 1) + start)
        assert (await asyncio.wait_for(reader.read(), LIMIT_S)).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("before", (b"", GET.replace(b"Connection: close\r\n", b"")), ids=("first", "second"))
async def test_a_large_head_in_one_piece_is_refused(before: bytes) -> None:
    """Also one that lies in one piece with an earlier request, which is answered."""
    app = Echo()
    async with connection(app) as (reader, writer):
        writer.write(before + b"GET / HTTP/1.1\r\nHost: a\r\n" + PIECE * (MAX_HEAD_BYTES // len(PIECE) + 1) + b"\r\n")
        answers = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert answers.count(b"HTTP/1.1 200") == len(app.names) == bool(before)
    assert before or (answers.startswith(b"HTTP/1.1 400") and b"too large" in answers)


async def test_a_long_chunked_body_and_a_head_below_the_limit_are_served() -> None:
    app, chunk = Echo(), b"3e8\r\n" + b"b" * 1000 + b"\r\n"
    head = GET[:-2] + PIECE * (MAX_HEAD_BYTES // len(PIECE) - 1) + b"\r\n"
    async with connection(app) as (reader, writer):
        writer.write(CHUNKED + chunk * 300 + b"0\r\n\r\n" + head)
        answers = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert answers.count(b"HTTP/1.1 200") == 2 and b"b" * 300_000 in answers


async def test_a_bad_body_behind_a_request_writes_nothing_into_its_answer() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with connection(slow) as (reader, writer):
        writer.write(GET.replace(b"Connection: close\r\n", b"") + CHUNKED)
        await asyncio.wait_for(reader.readuntil(b"begun"), LIMIT_S)
        writer.write(b"no size\r\n")
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
