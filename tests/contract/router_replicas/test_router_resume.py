"""A client that resumes a broken stream gets the text, tokens, logprobs and end of the unbroken one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from quire import AsyncClient, RequestOutput, SamplingParams
from quire.v1 import inference_pb2 as ib
from quire_common.columns import i32, pack_i32
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

PROMPT, TOKENS = "añb🙂c", 14


async def collect(rig: RouterRig, resume: ib.Resume | None = None, **fields: Any) -> list[ib.GenerateResponse]:
    request = ib.GenerateRequest(text=PROMPT, max_tokens=TOKENS, return_token_ids=True, resume=resume, **fields)
    request.sampling.logprobs, request.sampling.seed = 1, 9
    return [response async for response in rig.inference.Generate(request)]


def tokens(responses: list[ib.GenerateResponse]) -> list[int]:
    return [int(token) for response in responses for token in i32(response.token_ids, "ids")]


def logprobs(responses: list[ib.GenerateResponse]) -> list[tuple[int, float, int]]:
    return [(e.token_id, e.logprob, e.text_offset) for response in responses for e in response.logprobs]


async def test_resume_after_any_response_gives_the_whole_answer() -> None:
    async with router_rig() as rig:
        whole = await collect(rig)
        ids, text = tokens(whole), "".join(r.text for r in whole)
        assert len(ids) == TOKENS and text
        for split in range(len(whole)):
            had = whole[:split]
            resume = ib.Resume(output_ids=pack_i32(tokens(had)), characters=sum(len(response.text) for response in had))
            rest = await collect(rig, resume)
            assert "".join(r.text for r in [*had, *rest]) == text, split
            assert tokens([*had, *rest]) == ids
            assert logprobs([*had, *rest])[: len(tokens(had))] == logprobs(had)
            assert [entry[0] for entry in logprobs(rest)] == tokens(rest)
            assert rest[-1].finish_reason == whole[-1].finish_reason
            assert rest[-1].usage.completion_tokens == TOKENS
            submitted = rig.scheduler.submits[-1]
            assert submitted.sequence.output_ids == resume.output_ids and submitted.sequence.sampling.seed == 9


class Cable:
    """A TCP forwarder that can be cut."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self.cuts = 0

    async def plug(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest.mark.parametrize("n", [1, 2])
async def test_client_resumes_after_a_broken_connection(n: int) -> None:
    async with router_rig([FakeScheduler(step_s=0.02)]) as rig:
        cable = Cable(rig.grpc_address)
        server = await asyncio.start_server(cable.plug, "127.0.0.1", 0)
        async with server, AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            params = SamplingParams(max_tokens=30, n=n, logprobs=1)
            whole = await client.complete(PROMPT, params)
            output, deltas = RequestOutput(), 0
            async for delta in client.generate(PROMPT, params, return_token_ids=True):
                output.add(delta)
                deltas += 1
                if deltas in (5, 11, 16):
                    cable.cut()
        cuts, submits = cable.cuts, len(rig.scheduler.submits)
    assert cuts == 3 and submits > 2 * n
    for got, wanted in zip(output.outputs, whole.outputs, strict=True):
        assert (got.text, got.token_ids, got.logprobs) == (wanted.text, wanted.token_ids, wanted.logprobs)
        assert got.finish_reason == wanted.finish_reason
    assert output.usage is not None and output.usage.completion_tokens == 30 * n


@pytest.mark.parametrize(
    ("fields", "resume", "code"),
    [
        ({"n": 2}, ib.Resume(), "BAD_RESUME"),
        ({}, ib.Resume(output_ids=b"abc"), "BAD_COLUMN"),
        ({}, ib.Resume(output_ids=pack_i32([1] * TOKENS)), "BAD_RESUME"),
        ({}, ib.Resume(output_ids=pack_i32([1]), characters=10**6), "BAD_RESUME"),
        ({}, ib.Resume(output_ids=pack_i32([300])), "TOKEN_OUT_OF_RANGE"),
        ({}, ib.Resume(output_ids=pack_i32([-1])), "TOKEN_OUT_OF_RANGE"),
    ],
)
async def test_impossible_resume_is_refused(fields: dict[str, Any], resume: ib.Resume, code: str) -> None:
    async with router_rig() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(rig, resume, **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert code in str(caught.value.trailing_metadata())
        assert rig.router.admission.inside == 0 and not rig.scheduler.submits


async def test_fill_context_applies_to_text_prompts() -> None:
    async with router_rig() as rig:
        request = ib.GenerateRequest(text="abc", fill_context=True)
        call = rig.inference.Generate(request)
        await call.read()
        assert rig.scheduler.submits[0].sequence.stop.max_tokens == rig.scheduler.max_model_len - 3
        call.cancel()
