"""The Tokenizer contract, method by method: protobuf in, the domain's work, protobuf out."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as pb
from quire.v1 import tokenizer_pb2_grpc
from quire_common.columns import i32, pack_i32
from quire_common.errors import QuireError
from quire_tokenizer import codec, statistics
from quire_tokenizer.detokenize.detokenizer import Detokenizer, StepText
from quire_tokenizer.detokenize.long_rows import TURN_TOKENS, step_in_turns
from quire_tokenizer.tokenize_stream import TokenizeStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from quire_tokenizer.text_service import TextService


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Used from one event loop. `texts` becomes ready after the port opens; until then calls are UNAVAILABLE."""

    def __init__(self, texts: TextService) -> None:
        self._texts = texts

    async def Encode(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> pb.EncodeResponse:
        return await self._encode(request)

    async def RenderChat(
        self,
        request: pb.RenderChatRequest,
        context: grpc.aio.ServicerContext[pb.RenderChatRequest, pb.RenderChatResponse],
    ) -> pb.RenderChatResponse:
        """Render a conversation by its chat template and, unless the request has `text_only`, encode the text. Raises
        the QuireErrors of `ChatRenderer.render` and `Encoder.encode_marked`."""
        return await self._render(request)

    async def CompileGrammar(
        self,
        request: pb.CompileGrammarRequest,
        context: grpc.aio.ServicerContext[pb.CompileGrammarRequest, pb.CompileGrammarResponse],
    ) -> pb.CompileGrammarResponse:
        """Compile the constraint or the tools of a request to a grammar that engines take. Raises the QuireErrors of
        `GrammarCompiler.compile`, and InvalidArgument if the request has neither."""
        return await self._compile(request)

    async def Tokenize(
        self,
        request_iterator: AsyncIterator[pb.TokenizeRequest],
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> None:
        """Answer a standing stream of texts to encode, conversations to render and grammars to compile, each as soon as
        it is ready."""
        await TokenizeStream(self._tokenize, context.write).run(request_iterator)

    async def Detokenize(
        self,
        request_iterator: AsyncIterator[pb.DetokenizeRequest],
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> AsyncIterator[pb.DetokenizeResponse]:
        """Turn a stream of engine steps into text. Each message opens, advances and closes requests, in this order. It
        is answered by one message, or by several if its texts may be long. An error of one request is in the answer;
        malformed columns of a step end the stream with InvalidArgument. Long work gives way to other streams. Counts
        tokens and errors in metrics. Raises the errors of `TextService.detokenizing`."""
        with self._texts.detokenizing() as detokenizer:
            async for request in request_iterator:
                started, answer = time.perf_counter_ns(), StepText()
                if request.open:
                    await _open(detokenizer, request, answer)
                long = len(request.token) > 4 * TURN_TOKENS
                if long:
                    for _ in step_in_turns(detokenizer.step, codec.decode_rows(request), answer):
                        await asyncio.sleep(0)
                elif request.handle:
                    detokenizer.step(codec.decode_rows(request), answer)
                if request.close:
                    detokenizer.close(i32(request.close, "close").tolist())
                statistics.stepped(answer)
                if not long and not detokenizer.owes_long:
                    yield codec.encode_step(answer, _since_us(started))
                    continue
                detokenizer.told(answer)
                for response in codec.encode_long_step(answer, _since_us(started)):
                    yield response

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse]
    ) -> pb.DecodeResponse:
        """Decode each list of token ids to a text."""
        columns = [i32(column, "token_ids") for column in request.token_ids]
        texts = await self._texts.tools.whole_decoder.decode(columns, skip_special_tokens=request.skip_special_tokens)
        return pb.DecodeResponse(texts=texts)

    async def GetTokenBytes(
        self,
        request: pb.GetTokenBytesRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenBytesRequest, pb.GetTokenBytesResponse],
    ) -> pb.GetTokenBytesResponse:
        """Return, for each token id of the request, the bytes that the token adds to a text when it is not the first
        token there. An id beyond the vocabulary adds none."""
        column = i32(request.token_ids, "token_ids")
        return pb.GetTokenBytesResponse(token_bytes=await self._texts.tools.whole_decoder.token_bytes(column))

    async def GetTokenizerInfo(
        self,
        request: pb.GetTokenizerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerInfoRequest, pb.GetTokenizerInfoResponse],
    ) -> pb.GetTokenizerInfoResponse:
        """Return what clients want to know of the vocabulary: its size, end tokens, digest and the like."""
        return codec.encode_info(self._texts.tools.vocabulary)

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Do the work of one request of a Tokenize stream: render, compile or encode. Returns the answer without the
        request's id."""
        if request.HasField("render"):
            return pb.TokenizeResponse(rendered=await self._render(request.render))
        if request.HasField("compile"):
            return pb.TokenizeResponse(compiled=await self._compile(request.compile))
        return pb.TokenizeResponse(encoded=await self._encode(request.encode))

    async def _encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encode the request's texts, and count their tokens in the metric. Many ids are copied to the answer in a
        thread; the time in the answer is without this copy."""
        started = time.perf_counter_ns()
        ids = await self._texts.tools.encoder.encode(
            list(request.texts),
            add_special_tokens=request.add_special_tokens,
            allow_special_tokens=request.allow_special_tokens,
            max_tokens=request.max_tokens,
        )
        tokens, elapsed_us = sum(map(len, ids)), _since_us(started)
        statistics.encoded(tokens)
        return await self._texts.run_copy(
            lambda: pb.EncodeResponse(token_ids=[pack_i32(column) for column in ids], elapsed_us=elapsed_us), tokens
        )

    async def _compile(self, request: pb.CompileGrammarRequest) -> pb.CompileGrammarResponse:
        """Compile a grammar, or find it among those that are kept."""
        started = time.perf_counter_ns()
        compiled = await self._texts.tools.grammars.compile(codec.decode_grammar_source(request))
        return codec.encode_grammar(compiled, _since_us(started))

    async def _render(self, request: pb.RenderChatRequest) -> pb.RenderChatResponse:
        """Render the conversation and, unless `text_only`, encode the text, which `ids_only` leaves out of the answer.
        The answer also says whether the prompt ends within reasoning or after it. Metrics get the time of rendering and
        the number of tokens."""
        started = time.perf_counter_ns()
        tools = self._texts.tools
        with statistics.rendering():
            rendering = await tools.renderer.render(codec.decode_chat(request))
        end = codec.encode_prompt_end(tools.vocabulary.parsers.prompt_end(rendering.text))
        if request.text_only:
            return pb.RenderChatResponse(text=rendering.text, prompt_end=end, elapsed_us=_since_us(started))
        ids = await tools.encoder.encode_marked(rendering.text, rendering.specials, max_tokens=request.max_tokens)
        statistics.encoded(len(ids))
        text, elapsed_us = "" if request.ids_only else rendering.text, _since_us(started)
        return await self._texts.run_copy(
            lambda: pb.RenderChatResponse(text=text, token_ids=pack_i32(ids), prompt_end=end, elapsed_us=elapsed_us),
            len(ids),
        )


async def _open(detokenizer: Detokenizer, request: pb.DetokenizeRequest, answer: StepText) -> None:
    """Open the requests that an engine step brings; errors of single ones go to `answer`. Between pieces of a long
    history, other tasks of the event loop run."""
    for message in request.open:
        try:
            for _ in detokenizer.open(codec.decode_open(message)):
                await asyncio.sleep(0)
        except QuireError as error:
            answer.errors.append((message.handle, error))


def _since_us(started: int) -> int:
    return (time.perf_counter_ns() - started) // 1000
