"""One tokenizer as the router sees it: the gRPC channel, the calls, and whether the tokenizer can be used now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import tokenizer_pb2 as tb
from quire.v1 import tokenizer_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.columns import i32
from quire_common.errors import QuireError, internal_error
from quire_common.identity.callers import TOKENIZER
from quire_common.telemetry import tracing
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.text.tokenize_stream import TokenizeStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_router.config import RouterConfig

_TIMEOUT_S = 60.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The tokenizer's answer to GetTokenizerInfo."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    digest: bytes
    thinking_start: tuple[int, ...]
    """Tokens that mark the thinking; empty where the model is not known to think."""
    thinking_end: tuple[int, ...]
    tool_parser: str = ""
    """Name of the parser of tool calls; empty where there is none."""


class TokenizerLink:
    """The link to one tokenizer. The link probes the tokenizer until it answers and serves; then the link is healthy.
    When the tokenizer is lost or stops serving, the probing begins again. `changed` is called when the link becomes
    healthy and when it stops being healthy. Streams and calls that run while the tokenizer drains may go on until they
    end."""

    def __init__(self, instance: str, address: str, config: RouterConfig, changed: Callable[[], None]) -> None:
        self.instance = instance
        self.address = address
        self.info: TokenizerInfo | None = None
        self.healthy = False
        self._timeout_s = config.tokenizer_timeout_s
        self._channel = aio_channel(address, config, TOKENIZER)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._stream = TokenizeStream(self.stub, config.tokenizer_timeout_s)
        self._streaming: asyncio.Task[None] | None = None
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._changed = changed
        self._suspected = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether a call would reach the tokenizer now, as far as is known."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def suspect(self) -> None:
        """Mark the tokenizer as lost, because a call or a stream to it failed. The router does not use this tokenizer
        until it answers a probe; `run` begins to probe it. Logs the loss if the tokenizer was healthy, and calls
        `changed`."""
        if self.healthy:
            log.warning("tokenizer lost", instance=self.instance)
        self.healthy = False
        self._suspected.set()
        self._changed()

    async def encode(self, request: tb.EncodeRequest) -> tb.EncodeResponse:
        """Tokenize texts over the standing stream. If the stream does not take the request, or does not answer in time,
        make a unary call instead. Raises the errors of `TokenizeStream.ask`, Internal for an answer of another kind,
        and grpc.RpcError if the unary call fails."""
        if self._stream.takes(request):
            answer = await self._stream.ask(tb.TokenizeRequest(encode=request))
            if answer is not None:
                if not answer.HasField("encoded"):
                    raise internal_error()
                return answer.encoded
        response: tb.EncodeResponse = await self.stub.Encode(request, timeout=_TIMEOUT_S)
        return response

    async def render(self, request: tb.RenderChatRequest) -> tb.RenderChatResponse:
        """Render and tokenize a conversation over the standing stream. If the stream does not take the request, or does
        not answer in time, make a unary call instead. Raises the errors of `TokenizeStream.ask`, Internal for an answer
        of another kind, and grpc.RpcError if the unary call fails."""
        if self._stream.takes(request):
            answer = await self._stream.ask(tb.TokenizeRequest(render=request))
            if answer is not None:
                if not answer.HasField("rendered"):
                    raise internal_error()
                return answer.rendered
        response: tb.RenderChatResponse = await self.stub.RenderChat(request, timeout=_TIMEOUT_S)
        return response

    async def compile(self, request: tb.CompileGrammarRequest) -> tb.CompileGrammarResponse:
        """Compile a grammar over the standing stream. If the stream does not take the request, or does not answer in
        time, make a unary call instead. Raises the errors of `TokenizeStream.ask`, Internal for an answer of another
        kind, and grpc.RpcError if the unary call fails."""
        if self._stream.takes(request):
            answer = await self._stream.ask(tb.TokenizeRequest(compile=request))
            if answer is not None:
                if not answer.HasField("compiled"):
                    raise internal_error()
                return answer.compiled
        response: tb.CompileGrammarResponse = await self.stub.CompileGrammar(request, timeout=_TIMEOUT_S)
        return response

    async def answers(self, within_s: float) -> bool:
        """Whether the tokenizer answers a short call within `within_s` seconds; an error is no answer. A tokenizer that
        works answers short calls even during a long piece of work."""
        try:
            await self.stub.GetTokenizerInfo(tb.GetTokenizerInfoRequest(), timeout=within_s)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def run(self) -> None:
        """Probe the tokenizer until it serves, wait until it is lost, and begin again. The standing stream runs
        meanwhile. Runs until cancelled; then closes the channel."""
        self._begin_streaming()
        try:
            while True:
                await self._probe()
                self._begin_streaming()
                self._suspected.clear()
                self.healthy = True
                log.info("tokenizer ready", instance=self.instance)
                self._changed()
                await self._until_lost()
                self.suspect()
        finally:
            if self._streaming is not None:
                self._streaming.cancel()
            await self._channel.close()

    def _begin_streaming(self) -> None:
        """Start the task of the standing stream, unless the task runs already or tracing is on. Called again after each
        loss, because a tokenizer may come back with a release that knows the stream."""
        # With tracing, the router makes unary calls, because each call has a span of its own in the trace.
        if not tracing.enabled() and (self._streaming is None or self._streaming.done()):
            self._streaming = asyncio.create_task(self._stream.run())

    async def _until_lost(self) -> None:
        """Return when `suspect` was called, or when the health service says that the tokenizer serves no more or does
        not answer. For a tokenizer without a health service, only `suspect` counts."""
        signs = [asyncio.create_task(self._suspected.wait()), asyncio.create_task(self._wait_while_serving())]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _wait_while_serving(self) -> None:
        """Return when the health service says that the tokenizer serves no more, does not answer, or sends an answer
        that cannot be read. If the tokenizer has no health service, never return."""
        call = self._health.Watch(health_pb2.HealthCheckRequest())
        try:
            async for response in call:
                if response.status != _SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # then only calls can tell
                await asyncio.Event().wait()
        except Exception:
            log.exception("health stream failed", instance=self.instance)
        finally:
            call.cancel()

    async def _probe(self) -> None:
        """Call the tokenizer, with a backoff between attempts, until it serves and has sent a TokenizerInfo that can be
        read. Stores the info."""
        backoff = Backoff()
        while True:
            try:
                if await self._serves():
                    info = await self.stub.GetTokenizerInfo(tb.GetTokenizerInfoRequest(), timeout=self._timeout_s)
                    self.info = _info_of(info)
                    return
            except grpc.aio.AioRpcError as error:
                log.debug("tokenizer does not answer", instance=self.instance, code=error.code().name)
            except QuireError as error:
                log.warning("tokenizer sent an unreadable info", instance=self.instance, reason=str(error))
            except Exception:  # gRPC makes None of an answer that cannot be parsed
                log.exception("tokenizer probe failed", instance=self.instance)
            await backoff.wait()

    async def _serves(self) -> bool:
        """Return whether the health service says that the tokenizer serves; True if the tokenizer has no health
        service. Raises grpc.RpcError if the health service does not answer."""
        try:
            response = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return True
        return bool(response.status == _SERVING)


def _info_of(info: tb.GetTokenizerInfoResponse) -> TokenizerInfo:
    """Convert the info from the wire. Raises InvalidArgument for a column of ids that is not whole int32 numbers."""
    eos, start, end = (
        tuple(i32(column, "GetTokenizerInfo").tolist())
        for column in (info.eos_token_ids, info.thinking_start_ids, info.thinking_end_ids)
    )
    return TokenizerInfo(
        info.model, info.vocab_size, eos, info.has_chat_template, info.digest, start, end, info.tool_parser
    )
