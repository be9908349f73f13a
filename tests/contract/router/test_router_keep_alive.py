"""The connections of the HTTP port that wait for their next request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from quire_router.front.http import protocol
from quire_router.front.http import server as http_server
from quire_router.front.http.server import HttpServer

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
ANSWER = b"hello"
LIMIT_S = 20.0


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST)
    assert await asyncio.wait_for(reader.readuntil(ANSWER), LIMIT_S)
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.close()
    await server.close()


def test_connections_outlive_the_idle_times_of_common_clients() -> None:
    """60 s: AWS's and nginx's load balancers; httpx, and so OpenAI's client, keeps 5 s."""
    assert http_server.KEEP_ALIVE_S > 60


@pytest.mark.parametrize("bad", (b"GET / HT", b"no head at all\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000))
async def test_a_bad_head_behind_a_request_writes_nothing_into_its_answer(
    bad: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that stay incomplete, are none, or are too large."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)
    go_on, calls = asyncio.Event(), 0

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal calls
        calls += 1
        headers = [(b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER[:2], "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": ANSWER[2:]})

    server = HttpServer(slow, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST + bad)
    await asyncio.wait_for(reader.readuntil(ANSWER[:2]), LIMIT_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    go_on.set()
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == ANSWER[2:], "the answer, then the connection's end"
    assert calls == 1
    writer.close()
    await server.close()
