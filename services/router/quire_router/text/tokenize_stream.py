"""One tokenizer's standing stream for short texts and conversations: half the way of a call, which is set up each time.

While there is no stream (not yet, not any more, or never with a tokenizer of another release) who asks makes a call.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire_common.errors import DeadlineExceeded, Unavailable, from_message
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.watchdog import is_cancelled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire.v1 import tokenizer_pb2_grpc

# More goes by a call, lest the others wait behind it.
MOST_BYTES = 64 * 1024
log = get_logger(__name__)


class TokenizeStream:
    """Whoever asks `takes` may `ask` at once."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub, timeout_s: float) -> None:
        self._stub = stub
        self._timeout_s = timeout_s
        self._open = False
        self._out: asyncio.Queue[tb.TokenizeRequest] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[tb.TokenizeResponse]] = {}
        self._ids = itertools.count(1)

    def takes(self, request: tb.EncodeRequest | tb.RenderChatRequest) -> bool:
        """Whether it is open, and for a request of this size."""
        return self._open and request.ByteSize() <= MOST_BYTES

    async def ask(self, request: tb.TokenizeRequest) -> tb.TokenizeResponse:
        """The answer; the request is given its id. Raises QuireError: Unavailable where the stream breaks."""
        out, request.id = self._out, next(self._ids)
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        out.put_nowait(request)
        try:
            async with asyncio.timeout(self._timeout_s):
                response: tb.TokenizeResponse = await future
        except BaseException as error:
            out.put_nowait(tb.TokenizeRequest(id=request.id, cancel=True))
            if isinstance(error, TimeoutError):
                raise _too_slow(self._timeout_s) from None
            raise
        finally:
            del self._waiting[request.id]
        if response.HasField("error"):
            raise from_message(response.error)
        return response

    async def run(self) -> None:
        """Until cancelled, or the tokenizer knows no such stream: one stream after the other."""
        backoff = Backoff()
        while True:
            try:
                await self._life(backoff)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            await backoff.wait()

    async def _life(self, backoff: Backoff) -> None:
        """Raises grpc.RpcError."""
        out = self._out = asyncio.Queue()
        call = self._stub.Tokenize(_messages(out))
        try:
            async for response in call:
                self._open = True
                backoff.reset()
                future = self._waiting.get(response.id)
                if future is not None and not future.done():
                    future.set_result(response)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.warning("a message to the tokenizer could not be made")
        finally:
            self._open = False
            call.cancel()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_lost())


async def _messages(out: asyncio.Queue[tb.TokenizeRequest]) -> AsyncIterator[tb.TokenizeRequest]:
    while True:
        yield await out.get()


def _lost() -> Unavailable:
    return Unavailable("TOKENIZER_LOST", "The tokenizer went away.", "Ask another.", retry_after_s=1.0)


def _too_slow(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded("TOKENIZER_TIMEOUT", f"The tokenizer took longer than {timeout_s:g} s.", "Send less text.")
