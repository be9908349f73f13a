"""The tokenizer's standing stream: what calls answer, each as soon as it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import tokenizer_pb2 as pb
from tests.contract.tokenizer.test_tokenizer_service import LOOPS, Stub, chat, children, serving, wait_for
from tests.unit.tokenizer import folders


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Stub]:
    folder = folders.write_folder(tmp_path / "tiny")
    async with serving(folder, allow_request_chat_template=True, render_timeout_s=30.0) as made:
        yield made


async def opened(stub: Stub) -> Any:
    call = stub.Tokenize()
    assert await call.read() == pb.TokenizeResponse()
    return call


async def test_tokenize_stream_answers_equal_calls(stub: Stub) -> None:
    text = pb.EncodeRequest(texts=["hello <|im_end|> world", "x"], add_special_tokens=True)
    talk = chat(("user", "hello"), add_generation_prompt=True)
    call = await opened(stub)
    for request in (
        pb.TokenizeRequest(id=7, encode=text),
        pb.TokenizeRequest(id=8, render=talk),
        pb.TokenizeRequest(id=9, encode=pb.EncodeRequest(texts=["the dog " * 100], max_tokens=10)),
    ):
        await call.write(request)
    answers = {answer.id: answer for answer in [await call.read() for _ in range(3)]}
    assert answers[7].encoded.token_ids == (await stub.Encode(text)).token_ids
    assert answers[8].rendered.token_ids == (await stub.RenderChat(talk)).token_ids
    assert answers[9].error.code == "PROMPT_TOO_LONG"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_short_texts_overtake_and_cancelled_work_ends(stub: Stub) -> None:
    before, call = children(), await opened(stub)
    await call.write(pb.TokenizeRequest(id=1, render=chat(("user", "x"), chat_template=LOOPS)))
    await wait_for(lambda: children() - before)
    for number in (2, 3):
        await call.write(pb.TokenizeRequest(id=number, encode=pb.EncodeRequest(texts=["x"])))
        assert (await call.read()).id == number
    await call.write(pb.TokenizeRequest(id=1, cancel=True))
    await wait_for(lambda: not children() - before)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_broken_tokenize_stream_ends_its_work(stub: Stub) -> None:
    before, call = children(), await opened(stub)
    await call.write(pb.TokenizeRequest(id=1, render=chat(("user", "x"), chat_template=LOOPS)))
    await wait_for(lambda: children() - before)
    call.cancel()
    await wait_for(lambda: not children() - before)
