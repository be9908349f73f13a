"""A gRPC server of fakes in the test's own loop, that can be stopped and started again on the same port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import grpc
import uvloop

from quire_common.telemetry.interceptors import aio_server_interceptors
from quire_common.transport import SERVER_OPTIONS


class GrpcHost:
    """`add` registers the servicer. Use as an async context manager."""

    def __init__(self, add: Callable[[grpc.aio.Server], None]) -> None:
        self._add = add
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = grpc.aio.server(interceptors=aio_server_interceptors(), options=SERVER_OPTIONS)
        self._add(server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """As if the process died: nothing is finished."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def __aenter__(self) -> GrpcHost:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def run_host(add: Callable[[grpc.aio.Server], None]) -> None:
    """Serve a fake from a process of its own, which prints its address, until the process is ended."""

    async def serve() -> None:
        async with GrpcHost(add) as host:
            print(host.address, flush=True)
            await asyncio.Event().wait()

    try:
        uvloop.run(serve())
    except KeyboardInterrupt:
        os._exit(0)
