"""Requests whose fields are all at their bounds are refused before tokenizer or engine get them."""

from __future__ import annotations

import grpc
import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.errors import from_rpc_error
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

LONG = [f"{i:02d}" + "x" * 510 for i in range(64)]


@pytest.mark.parametrize("route", ["completion", "chat"])
async def test_http_refuses_long_stop_lists_for_many_siblings(route: str) -> None:
    async with router_rig() as rig:
        ask = rig.complete if route == "completion" else rig.chat
        answer = await ask("abc", n=128, stop=LONG)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "PRODUCT_TOO_LARGE", "stop")
        assert not rig.tokenizer.encode_contexts and not rig.tokenizer.opens
        assert (await ask("abc", n=128, stop=["xyz", "###"], max_tokens=1)).status_code == 200


async def test_grpc_refuses_long_stop_lists_for_many_siblings() -> None:
    async with router_rig() as rig:
        asked = ib.GenerateRequest(text="abc", n=128, stop=LONG)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.inference.Generate(asked):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).code == "PRODUCT_TOO_LARGE"
        assert not rig.tokenizer.opens


async def test_too_many_logprobs_are_refused_before_an_engine_is_used() -> None:
    async with router_rig(max_logprobs=256, max_n=512) as rig:
        answer = await rig.complete("abc", n=512, logprobs=255, max_tokens=95)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "PRODUCT_TOO_LARGE", "logprobs")
        asked = ib.GenerateRequest(text="abc", n=512, max_tokens=95, sampling=pb.SamplingParams(logprobs=255))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.inference.Generate(asked):
                pass
        assert from_rpc_error(caught.value).code == "PRODUCT_TOO_LARGE"
        assert not rig.scheduler.submits


async def test_long_beams_are_refused_before_an_engine_is_used() -> None:
    async with router_rig([FakeScheduler(max_model_len=20_000)]) as rig:
        answer = await rig.complete("abc", n=128, use_beam_search=True, max_tokens=10_000)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "PRODUCT_TOO_LARGE", "n")
        assert "beam search" in error["message"]
        asked = ib.GenerateRequest(text="abc", n=128, max_tokens=10_000, beam_search=ib.BeamSearch())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.inference.Generate(asked):
                pass
        assert from_rpc_error(caught.value).code == "PRODUCT_TOO_LARGE"
        assert not rig.scheduler.submits and rig.router.admission.inside == 0
