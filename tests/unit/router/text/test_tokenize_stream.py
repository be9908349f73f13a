"""TokenizeStream opens another stream after any error of the stub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quire_router.text.tokenize_stream import TokenizeStream


class Stub:
    """Fails at first, in a way that is not gRPC's."""

    def __init__(self) -> None:
        self.calls = 0
        self.reached = asyncio.Event()

    def Tokenize(self, messages: AsyncIterator[Any]) -> Any:
        self.calls += 1
        if self.calls > 1:
            self.reached.set()
        raise RuntimeError("no call can be made")


async def test_non_grpc_error_does_not_end_the_stream_loop() -> None:
    stub: Any = Stub()
    running = asyncio.create_task(TokenizeStream(stub, 1.0).run())
    try:
        async with asyncio.timeout(10):
            await stub.reached.wait()
        assert not running.done()
    finally:
        running.cancel()
