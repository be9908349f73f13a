"""Control of generation, from a client's request to what a scheduler is asked, over HTTP and gRPC alike."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.columns import i32, pack_i32
from tests.fakes.router_rig import RouterRig, router_rig

CONTROLS = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"9": 250, "7": -2.5},
    "allowed_token_ids": [7, 9, 200],
    "bad_words": ["ab", " c"],
}


def asked(rig: RouterRig) -> dict[str, Any]:
    """Of the last submit."""
    sampling = rig.scheduler.submits[-1].sequence.sampling
    return {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias),
        "allowed_token_ids": i32(sampling.allowed_token_ids).tolist(),
        "bad_words_ids": [i32(word).tolist() for word in sampling.bad_words_ids],
    }


@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_controls_reach_the_engine(route: str) -> None:
    async with router_rig() as rig:
        response = await getattr(rig, route)("xyz", max_tokens=2, n=2, **CONTROLS)
        assert response.status_code == 200, response.text
        assert asked(rig) == {
            "presence_penalty": 0.5,
            "frequency_penalty": -1.5,
            "repetition_penalty": 1.25,
            "logit_bias": {7: -2.5, 9: 100.0},  # clamped, as vLLM does
            "allowed_token_ids": [7, 9, 200],
            "bad_words_ids": [[97, 98], [99]],  # with a space before them they are longer: no other spelling of them
        }


async def test_a_request_that_asks_for_nothing_sends_nothing() -> None:
    async with router_rig() as rig:
        neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []}
        await rig.complete("a", max_tokens=1, **neutral)
        sampling = rig.scheduler.submits[-1].sequence.sampling
        assert not sampling.HasField("repetition_penalty") and not sampling.logit_bias


async def test_the_same_over_grpc() -> None:
    async with router_rig() as rig:
        sampling = pb.SamplingParams(
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            logit_bias={9: 100, 7: -2.5},
            allowed_token_ids=pack_i32([7, 9, 200]),
            bad_words_ids=[pack_i32([5, 6])],
        )
        request = ib.GenerateRequest(text="xyz", max_tokens=2, sampling=sampling, bad_words=["ab"])
        assert [response async for response in rig.inference.Generate(request)]
        assert asked(rig)["bad_words_ids"] == [[5, 6], [97, 98]]
        assert asked(rig)["logit_bias"] == {7: -2.5, 9: 100.0}
        assert asked(rig)["allowed_token_ids"] == [7, 9, 200]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampling": pb.SamplingParams(presence_penalty=3)}, "presence_penalty is 3.0"),
        ({"sampling": pb.SamplingParams(repetition_penalty=0)}, "repetition_penalty is 0.0"),
        ({"sampling": pb.SamplingParams(frequency_penalty=float("nan"))}, "frequency_penalty is nan"),
        ({"sampling": pb.SamplingParams(logit_bias={1: 101})}, "logit_bias of token 1 is 101.0"),
        ({"sampling": pb.SamplingParams(logit_bias={300: 1})}, "logit_bias names token id 300"),
        ({"sampling": pb.SamplingParams(bad_words_ids=[b""])}, "an empty sequence"),
        ({"sampling": pb.SamplingParams(allowed_token_ids=pack_i32([-1]))}, "allowed_token_ids names token id -1"),
        ({"bad_words": [""]}, "an empty string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_values_over_grpc_are_named(fields: dict[str, Any], says: str) -> None:
    async with router_rig() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in rig.inference.Generate(ib.GenerateRequest(text="a", **fields))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert says in str(caught.value.details())
        assert not rig.scheduler.submits
