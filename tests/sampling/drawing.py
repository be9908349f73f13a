"""Asks a Quire for many first tokens after one prompt and some output, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import numpy as np
from numpy.typing import NDArray

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire.v1 import inference_pb2_grpc
from quire_common.columns import i32, pack_i32
from tests.sampling.reference import Asked

_TOGETHER = 256
_SIBLINGS = 100


async def draw(
    address: str, asked: Asked, prompt: Sequence[int], output: Sequence[int], samples: int, vocabulary: int, seed: int
) -> NDArray[np.int64]:
    """How often each token came. Without output, samples are siblings; with it each is a stream taken up."""
    counts = np.zeros(vocabulary, np.int64)
    gate = asyncio.Semaphore(_TOGETHER if output else 2 * _TOGETHER // _SIBLINGS)
    sampling = pb.SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        typical_p=asked.typical_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=asked.logit_bias,
        allowed_token_ids=pack_i32(asked.allowed_token_ids),
        seed=seed,
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one(number: int) -> None:
            request = ib.GenerateRequest(
                token_ids=ib.TokenIds(ids=pack_i32(prompt)),
                sampling=sampling,
                n=1 if output else _SIBLINGS,
                max_tokens=len(output) + 1,
                ignore_eos=True,
                return_token_ids=True,
            )
            if output:
                request.resume.output_ids = pack_i32(output)
                request.sampling.sample = number
            else:
                request.sampling.seed = seed + number
            async with gate:
                async for response in stub.Generate(request):
                    np.add.at(counts, i32(response.token_ids, "token_ids"), 1)

        await asyncio.gather(*(one(number) for number in range(samples if output else -(-samples // _SIBLINGS))))
    return counts
