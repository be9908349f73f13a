"""A service with all four call kinds, in aio and in threads, whose requests say what its handler does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from quire_common.errors import Overloaded
from quire_common.telemetry.interceptors import (
    UNTRACED,
    AioServerInterceptor,
    SyncServerInterceptor,
    aio_client_interceptors,
    sync_client_interceptors,
)
from quire_common.telemetry.logs import request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

SERVICE = "test.Echo"
KINDS = ("Unary", "ServerStream", "ClientStream", "Bidi")


def act(request: bytes) -> bytes:
    """What both kinds of handler do with one request."""
    match request:
        case b"typed":
            raise Overloaded("QUEUE_FULL", "The queue is full.", "Come back later.", param="n", retry_after_s=1.5)
        case b"bug":
            raise ZeroDivisionError("secret text of a bug")
        case b"id":
            return request_id.get().encode()
        case b"lost":
            raise asyncio.CancelledError
    return request.upper()


class AioEcho(grpc.GenericRpcHandler):
    """The aio service; `finished` tells how handlers left, `started` that one waits."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.finished: asyncio.Queue[str] = asyncio.Queue()
        self._handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "Bidi": grpc.stream_stream_rpc_method_handler(self.bidi),
            "Writes": grpc.unary_stream_rpc_method_handler(self.writes),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method.rpartition("/")[2])

    async def act(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "aborted by hand")
        if request == b"code":
            context.set_code(grpc.StatusCode.OUT_OF_RANGE)
        if request == b"wait":
            self.started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await self.finished.put("cancelled")
                raise
        return act(request)

    async def unary(self, request: bytes, context: Any) -> bytes:
        return await self.act(request, context)

    async def server_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            yield await self.act(request, context)
        finally:
            await self.finished.put("closed")

    async def writes(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        await context.write(await self.act(request, context))

    async def client_stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b",".join([await self.act(request, context) async for request in requests])

    async def bidi(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self.act(request, context)


class SyncEcho(grpc.GenericRpcHandler):
    """The threaded service; see AioEcho."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.closed = threading.Event()
        self._handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "Bidi": grpc.stream_stream_rpc_method_handler(self.bidi),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method.rpartition("/")[2])

    def act(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            context.abort(grpc.StatusCode.DATA_LOSS, "aborted by hand")
        if request == b"code":
            context.set_code(grpc.StatusCode.OUT_OF_RANGE)
        return act(request)

    def unary(self, request: bytes, context: Any) -> bytes:
        return self.act(request, context)

    def server_stream(self, request: bytes, context: Any) -> Iterator[bytes]:
        try:
            yield b"first"
            while request == b"forever":
                self.started.set()
                yield b"more" * 10_000
            yield self.act(request, context)
        finally:
            self.closed.set()

    def client_stream(self, requests: Iterator[bytes], context: Any) -> bytes:
        return b",".join([self.act(request, context) for request in requests])

    def bidi(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            yield self.act(request, context)


@contextlib.asynccontextmanager
async def aio_echo(untraced: Collection[str] = UNTRACED) -> AsyncIterator[tuple[AioEcho, Any]]:
    """A running aio service and an intercepted channel to it."""
    echo = AioEcho()
    server = grpc.aio.server(interceptors=[AioServerInterceptor(untraced)])
    server.add_generic_rpc_handlers((echo,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address, interceptors=aio_client_interceptors(address)) as channel:
        yield echo, channel
    await server.stop(1)


@contextlib.contextmanager
def sync_echo_port(workers: int = 4, echo: SyncEcho | None = None) -> Iterator[int]:
    """The port of a running threaded service."""
    pool = futures.ThreadPoolExecutor(workers)
    server = grpc.server(pool, interceptors=[SyncServerInterceptor()])
    server.add_generic_rpc_handlers((echo or SyncEcho(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(1).wait()
    pool.shutdown()


@contextlib.contextmanager
def sync_echo(workers: int = 4) -> Iterator[tuple[SyncEcho, Any]]:
    """A running threaded service and an intercepted channel to it."""
    echo = SyncEcho()
    with sync_echo_port(workers, echo) as port:
        address = f"127.0.0.1:{port}"
        with grpc.insecure_channel(address) as plain:
            yield echo, grpc.intercept_channel(plain, *sync_client_interceptors(address))


def aio_start(channel: Any, kind: str, request: bytes) -> Any:
    """A call of any kind, begun; `aio_finish` awaits its answer."""

    async def requests() -> AsyncIterator[bytes]:
        yield request

    path = f"/{SERVICE}/{kind}"
    match kind:
        case "Unary":
            return channel.unary_unary(path)(request)
        case "ClientStream":
            return channel.stream_unary(path)(requests())
        case "Bidi":
            return channel.stream_stream(path)(requests())
    return channel.unary_stream(path)(request)


async def aio_finish(call: Any, kind: str) -> bytes:
    """The answer; of a stream its last message."""
    if kind in ("Unary", "ClientStream"):
        return bytes(await call)
    return [bytes(response) async for response in call][-1]


async def aio_call(channel: Any, kind: str, request: bytes) -> bytes:
    """One whole call of any kind."""
    return await aio_finish(aio_start(channel, kind, request), kind)


def sync_call(channel: Any, kind: str, request: bytes) -> bytes:
    """One whole call of any kind."""
    path = f"/{SERVICE}/{kind}"
    match kind:
        case "Unary":
            return bytes(channel.unary_unary(path)(request))
        case "ClientStream":
            return bytes(channel.stream_unary(path)(iter([request])))
        case "Bidi":
            return bytes(list(channel.stream_stream(path)(iter([request])))[-1])
    return bytes(list(channel.unary_stream(path)(request))[-1])
