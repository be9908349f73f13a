"""The permanent stream to one tokenizer, for short texts, conversations and grammars. A request on the stream takes
about half as long as a unary call, because gRPC must set up each call.

The caller makes a unary call instead if the stream is not open, or if its answer does not come in time. The stream
never opens if the tokenizer is of a release that does not know this RPC.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire_common.cancellation import is_cancelled
from quire_common.errors import Unavailable, from_message
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire.v1 import tokenizer_pb2_grpc

# A larger request goes by a unary call, so that other requests do not wait behind it.
MOST_BYTES = 64 * 1024
log = get_logger(__name__)


class TokenizeStream:
    """Call `takes`; if it returns True, call `ask` before the next await. `patience_s` is the longest time that an
    answer may take. If the stream receives nothing at all while it owes an answer for this time, a new stream replaces
    it; an idle stream stays."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub, patience_s: float) -> None:
        self._stub = stub
        self._patience_s = patience_s
        self._open = False
        self._call: Any = None
        self._hangs = False
        self._heard_s = 0.0
        self._out: asyncio.Queue[tb.TokenizeRequest | None] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[tb.TokenizeResponse | None]] = {}
        self._ids = itertools.count(1)

    def takes(self, request: tb.EncodeRequest | tb.RenderChatRequest | tb.CompileGrammarRequest) -> bool:
        """Whether the stream is open, and the request short enough for it."""
        return self._open and request.ByteSize() <= MOST_BYTES

    async def ask(self, request: tb.TokenizeRequest) -> tb.TokenizeResponse | None:
        """Send the request under a new id, and return its answer. Returns None if the answer takes too long or the
        stream hangs; the caller may then make a unary call. Raises the QuireError in the answer, and Unavailable if the
        stream breaks.

        A request that times out or is cancelled is also cancelled at the tokenizer. If the stream has received nothing
        since the request began, a timeout replaces the stream.
        """
        began_s = time.monotonic()
        out, request.id = self._out, next(self._ids)
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        out.put_nowait(request)
        try:
            async with asyncio.timeout(self._patience_s):
                response: tb.TokenizeResponse | None = await future
        except BaseException as error:
            out.put_nowait(tb.TokenizeRequest(id=request.id, cancel=True))
            if not isinstance(error, TimeoutError):
                raise
            if out is self._out and self._heard_s < began_s:
                self._replace()
            return None
        finally:
            del self._waiting[request.id]
        if response is not None and response.HasField("error"):
            raise from_message(response.error)
        return response

    async def run(self) -> None:
        """Keep a stream open until cancelled; when a stream ends, open another after a backoff. Returns if the
        tokenizer does not know this RPC. Must not run twice at the same time."""
        backoff = Backoff()
        while True:
            try:
                await self._run_stream(backoff)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            except Exception:
                log.exception("a stream to the tokenizer failed")
            await backoff.wait()

    async def _run_stream(self, backoff: Backoff) -> None:
        """Run one stream, and give each answer to the `ask` call that waits for it. When the stream ends, all `ask`
        calls that still wait return None if the stream hangs, and otherwise raise Unavailable. Raises grpc.RpcError if
        the call ends with an error."""
        out = self._out = asyncio.Queue()
        call = self._call = self._stub.Tokenize(_messages(out))
        self._hangs = False
        try:
            async for response in call:
                self._open, self._heard_s = True, time.monotonic()
                backoff.reset()
                future = self._waiting.get(response.id)
                if future is not None and not future.done():
                    future.set_result(response)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.warning("a stream to the tokenizer hangs" if self._hangs else "a message to it could not be made")
        finally:
            self._open = False
            call.cancel()
            out.put_nowait(None)
            for future in self._waiting.values():
                if future.done():
                    continue
                if self._hangs:
                    future.set_result(None)
                else:
                    future.set_exception(_lost())

    def _replace(self) -> None:
        """Cancel a stream that hangs; `run` opens another."""
        self._open, self._hangs = False, True
        self._call.cancel()


async def _messages(out: asyncio.Queue[tb.TokenizeRequest | None]) -> AsyncIterator[tb.TokenizeRequest]:
    """Yield the queued requests until None is queued. Without this None, gRPC would leave the generator waiting after
    the peer has ended the call."""
    while (message := await out.get()) is not None:
        yield message


def _lost() -> Unavailable:
    return Unavailable("TOKENIZER_LOST", "The tokenizer went away.", "Ask another.", retry_after_s=1.0)
