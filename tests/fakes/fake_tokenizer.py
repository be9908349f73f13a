"""A tokenizer of bytes: ids 0-255 are bytes, 256 ends. Keeps the contract: whole characters, stop strings, offsets."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.v1 import tokenizer_pb2 as pb
from quire.v1 import tokenizer_pb2_grpc
from quire.v1.common_pb2 import RequestError
from quire_common.columns import i32, pack_i32
from quire_common.errors import InvalidArgument, QuireError, Unavailable, to_message
from quire_common.structured.constraint import LLGUIDANCE_VERSION, Constraint, constraint_to_pb
from tests.fakes.grpc_host import run_host

EOS, THINK, THOUGHT = 256, 257, 258
VOCAB = 300


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """`steps` counts Detokenize messages; `open_handles` are those that nobody has ended or closed.

    While `awake` is cleared nothing is answered, as by a process that is stopped; while `stepping` is, only Detokenize
    waits. `draining`: nothing new is opened. After `break_after` steps a Detokenize stream breaks, once. Its `health`
    says SERVING until it is told otherwise. Without `streams` it knows no Tokenize, by which
    `streamed` requests came, on one of `opened`; it answers none while it is `mute`, and says nothing while `blank`.
    It hangs of a text to encode that is the `poison`, and of rows of a sequence that has it as a stop string; with
    `dies` it is that instead.
    """

    def __init__(self, *, streams: bool = True) -> None:
        self.streams = streams
        self.opens: list[pb.DetokenizeOpen] = []
        self.steps = 0
        self.open_handles: set[int] = set()
        self.renders: list[pb.RenderChatRequest] = []
        self.prompt_end = pb.PROMPT_END_UNSPECIFIED
        self.tool_parser = ""
        self.grammar_version = LLGUIDANCE_VERSION
        self.compiles: list[pb.CompileGrammarRequest] = []
        # The answer of compiling, or the error that it ends with.
        self.grammar_warnings: list[str] = []
        self.grammar_error: QuireError | None = None
        self.token_bytes_calls = 0
        self.streamed = self.opened = 0
        self.mute = self.blank = False
        self.cancelled: list[int] = []
        self.encode_contexts: list[Any] = []
        self.hold_encode: asyncio.Event | None = None
        self.infos = 0
        self.awake, self.stepping = asyncio.Event(), asyncio.Event()
        self.awake.set()
        self.stepping.set()
        self.draining = False
        self.break_after: int | None = None
        self.thinking_marks: tuple[list[int], list[int]] = ([THINK], [THOUGHT])
        self.health = health.aio.HealthServicer()
        self.poison: str | None = None
        self.poisoned = False
        self.dies: Callable[[], Coroutine[Any, Any, None]] | None = None

    def add(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)

    async def stop_serving(self) -> None:
        """As at SIGTERM: what is open may end, nothing new is taken."""
        self.draining = True
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        self.encode_contexts.append(request.context)
        if self.poison in request.texts:
            await self._take_poison()
        await self.awake.wait()
        if self.hold_encode is not None:
            await self.hold_encode.wait()
        return pb.EncodeResponse(token_ids=[_ids(text, request.max_tokens) for text in request.texts], elapsed_us=11)

    async def RenderChat(self, request: pb.RenderChatRequest, context: Any) -> pb.RenderChatResponse:
        self.renders.append(request)
        await self.awake.wait()
        text = "".join(f"{m['role']}: {_content(m)}\n" for m in json.loads(request.messages_json))
        if request.add_generation_prompt:
            text += "assistant: "
        ids = _ids(text, request.max_tokens)
        return pb.RenderChatResponse(text=text, token_ids=ids, elapsed_us=12, prompt_end=self.prompt_end)

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: Any) -> pb.CompileGrammarResponse:
        """The grammar of a source is a text that names it."""
        self.compiles.append(request)
        await self.awake.wait()
        if self.grammar_error is not None:
            raise self.grammar_error
        source = request.tools.tools_json if request.HasField("tools") else request.constraint.text
        constraint = Constraint.of(f"{request.constraint.kind or 'tools'}: {source}", self.grammar_version)
        return pb.CompileGrammarResponse(constraint=constraint_to_pb(constraint), warnings=self.grammar_warnings)

    async def Tokenize(self, request_iterator: AsyncIterator[pb.TokenizeRequest], context: Any) -> None:
        """Encode, RenderChat and CompileGrammar, each in a task, which a cancel ends."""
        if not self.streams:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "of another release")
        self.opened += 1
        tasks: dict[int, asyncio.Task[None]] = {}
        writing = asyncio.Lock()

        async def answer(request: pb.TokenizeRequest) -> None:
            response = pb.TokenizeResponse(id=request.id)
            try:
                if self.blank:
                    pass
                elif request.HasField("render"):
                    response.rendered.CopyFrom(await self.RenderChat(request.render, context))
                elif request.HasField("compile"):
                    response.compiled.CopyFrom(await self.CompileGrammar(request.compile, context))
                else:
                    response.encoded.CopyFrom(await self.Encode(request.encode, context))
            except QuireError as error:
                response.error.CopyFrom(to_message(error))
            async with writing:
                await context.write(response)

        await context.write(pb.TokenizeResponse())
        try:
            async for request in request_iterator:
                if self.mute:
                    continue
                if request.cancel:
                    tasks[request.id].cancel()
                    self.cancelled.append(request.id)
                else:
                    self.streamed += 1
                    tasks[request.id] = asyncio.create_task(answer(request))
        finally:
            for task in tasks.values():
                task.cancel()

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        return pb.DecodeResponse(
            texts=[bytes(i for i in i32(c) if i < 256).decode("utf-8", "replace") for c in request.token_ids]
        )

    async def GetTokenBytes(self, request: pb.GetTokenBytesRequest, context: Any) -> pb.GetTokenBytesResponse:
        self.token_bytes_calls += 1
        await self.awake.wait()
        return pb.GetTokenBytesResponse(
            token_bytes=[bytes([i]) if i < 256 else b"<|%d|>" % i for i in i32(request.token_ids).tolist()]
        )

    async def GetTokenizerInfo(self, request: pb.GetTokenizerInfoRequest, context: Any) -> pb.GetTokenizerInfoResponse:
        self.infos += 1
        await self.awake.wait()
        return pb.GetTokenizerInfoResponse(
            model="fake",
            vocab_size=VOCAB,
            eos_token_ids=pack_i32([EOS]),
            has_chat_template=True,
            thinking_start_ids=pack_i32(self.thinking_marks[0]),
            thinking_end_ids=pack_i32(self.thinking_marks[1]),
            tool_parser=self.tool_parser,
        )

    async def Detokenize(
        self, request_iterator: AsyncIterator[pb.DetokenizeRequest], context: Any
    ) -> AsyncIterator[pb.DetokenizeResponse]:
        open_here: dict[int, _Text] = {}
        try:
            async for request in request_iterator:
                self.steps += 1
                await self.awake.wait()
                await self.stepping.wait()
                if self.poison is not None and self._has_poison(request, open_here):
                    await self._take_poison()
                    await self.awake.wait()
                yield self._step(request, open_here)
                if self.break_after is not None:
                    self.break_after -= 1
                    if self.break_after <= 0:
                        self.break_after = None
                        raise Unavailable("GONE", "This tokenizer is gone.", "Use another.")
        finally:
            self.open_handles -= open_here.keys()

    def _has_poison(self, request: pb.DetokenizeRequest, texts: dict[int, _Text]) -> bool:
        stops = {opened.handle: opened.stop for opened in request.open}
        stops |= {handle: text.options.stop for handle, text in texts.items()}
        return any(self.poison in stops.get(handle, ()) for handle in i32(request.handle).tolist())

    async def _take_poison(self) -> None:
        self.poisoned = True
        if self.dies is not None:
            self.death = asyncio.create_task(self.dies())  # which cancels the call that it is called in
        self.awake.clear()

    def _step(self, request: pb.DetokenizeRequest, texts: dict[int, _Text]) -> pb.DetokenizeResponse:
        refused = []
        for opened in request.open:
            if self.draining:
                error = RequestError(
                    code="TOKENIZER_DRAINING", grpc_code=grpc.StatusCode.UNAVAILABLE.value[0], message="m", fix="f"
                )
                refused.append(pb.DetokenizeError(handle=opened.handle, error=error))
                continue
            if opened.further:
                if opened.handle in texts:
                    texts[opened.handle].replay(opened.prior_ids)
                continue
            self.opens.append(opened)
            self.open_handles.add(opened.handle)
            texts[opened.handle] = _Text(opened)
        answer: list[tuple[int, str, int, int]] = []
        offsets: list[int] = []
        counts, tokens = i32(request.count).tolist(), i32(request.token).tolist()
        at = 0
        for handle, count, finish in zip(i32(request.handle).tolist(), counts, request.finish, strict=True):
            ids, at = tokens[at : at + count], at + count
            text = texts.get(handle)
            if text is None:
                continue
            out, stop_index, used, ends = text.feed(ids, finish)
            answer.append((handle, out, stop_index, used))
            offsets += ends if text.options.want_offsets else []
            if finish or stop_index >= 0:
                self._forget(handle, texts)
        for handle in i32(request.close).tolist():
            self._forget(handle, texts)
        return pb.DetokenizeResponse(
            handle=pack_i32([a[0] for a in answer]),
            text=[a[1] for a in answer],
            stop_index=pack_i32([a[2] for a in answer]),
            used=pack_i32([a[3] for a in answer]),
            text_offset=pack_i32(offsets),
            elapsed_us=len(answer),
            errors=refused,
        )

    def _forget(self, handle: int, texts: dict[int, _Text]) -> None:
        if texts.pop(handle, None) is not None:
            self.open_handles.discard(handle)


class _Text:
    """Plain and slow: the whole text is kept and searched."""

    def __init__(self, options: pb.DetokenizeOpen) -> None:
        self.options = options
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._sent = options.chars_sent
        self._hidden = set(i32(options.stop_token_ids).tolist())
        self.replay(options.prior_ids)

    def replay(self, prior_ids: bytes) -> None:
        for token in i32(prior_ids).tolist():
            self._append(token)

    def feed(self, ids: list[int], finish: int) -> tuple[str, int, int, list[int]]:
        ends: list[int] = []
        for used, token in enumerate(ids, 1):
            last = used == len(ids) and finish == 1
            if not (last and token in self._hidden and not self.options.include_stop_str_in_output):
                self._append(token)
            index, end = self._match()
            if index >= 0:
                ends.append(end)
                return self._release(end), index, used, ends
            ends.append(len(self._text))
        if finish:
            self._text += self._decoder.decode(b"", True)
            return self._release(len(self._text)), -1, len(ids), ends
        return self._release(len(self._text) - self._hold()), -1, len(ids), ends

    def _append(self, token: int) -> None:
        self._text += self._decoder.decode(bytes([token])) if token < 256 else ""

    def _match(self) -> tuple[int, int]:
        for index, stop in enumerate(self.options.stop):
            at = self._text.find(stop)
            if at >= 0:
                return index, at + len(stop) if self.options.include_stop_str_in_output else at
        return -1, 0

    def _hold(self) -> int:
        longest = 0
        for stop in self.options.stop:
            for size in range(1, len(stop)):
                if self._text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def _release(self, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return self._text[start:end]


def _content(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _ids(text: str, limit: int) -> bytes:
    data = text.encode()
    if limit and len(data) > limit:
        raise InvalidArgument(
            "PROMPT_TOO_LONG", f"The prompt has more than {limit} tokens.", "Shorten it.", param="prompt"
        )
    return pack_i32(list(data))


if __name__ == "__main__":
    run_host(FakeTokenizer().add)
