"""The SMG codec refuses or converts the largest messages without long callbacks on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vb

from quire_common.errors import InvalidArgument
from quire_router.front.grpc.smg.request_codec import MAX_ABORTED, aborted_ids, parse_generate
from quire_router.front.parameters.request_limits import Limits
from quire_router.sequences.job import TokenPrompt
from tests.cpu_time import least_cpu_s

LIMITS = Limits(128, 20)
CONTEXT = 131_072
MANY = 2_000_000


async def turns_of(parse: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, int, float]:
    """The result, or the error; in how many turns of the loop it came, and the CPU time of the longest of them. The
    least of three: Python's garbage collector may run within any."""
    longest_s = []
    for _ in range(3):
        task, spent_s = asyncio.ensure_future(parse()), list[float]()
        while not task.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            spent_s.append(time.thread_time() - began)
        longest_s.append(max(spent_s))
    return task.exception() or task.result(), len(spent_s), min(longest_s)


def ids(count: int, **sampling: Any) -> vb.GenerateRequest:
    tokens = [1 + i % 1000 for i in range(count)]
    return vb.GenerateRequest(
        tokenized=vb.TokenizedInput(input_ids=tokens), sampling_params=vb.SamplingParams(**sampling)
    )


def sampled(**sampling: Any) -> vb.GenerateRequest:
    return vb.GenerateRequest(text="a", sampling_params=vb.SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("make_request", "code", "param"),
    [
        (lambda: ids(MANY), "PROMPT_TOO_LONG", "prompt"),
        (lambda: sampled(logit_bias=dict.fromkeys(range(MANY // 6), 1.0)), "TOO_MANY_ITEMS", "logit_bias"),
        (lambda: sampled(stop_token_ids=[1] * MANY), "TOO_MANY_ITEMS", "stop_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_list_lengths_are_checked_before_conversion(
    make_request: Callable[[], vb.GenerateRequest], code: str, param: str
) -> None:
    """To convert them first took 70 to 100 ms of the event loop."""
    request_ = make_request()
    error, _, longest_s = await turns_of(lambda: parse_generate(request_, LIMITS, CONTEXT))
    assert isinstance(error, InvalidArgument) and (error.code, error.param) == (code, param)
    assert longest_s < 0.02


async def test_long_prompt_is_converted_in_turns() -> None:
    request = ids(1_000_000)
    job, turns, longest_s = await turns_of(lambda: parse_generate(request, LIMITS, 1_048_576))
    (prompt,) = job.prompts
    assert isinstance(prompt, TokenPrompt) and prompt.ids.dtype == np.int32
    assert prompt.ids.tolist() == [1 + i % 1000 for i in range(1_000_000)]
    assert turns >= 16 and longest_s < 0.02


async def test_truncated_prompt_converts_at_most_the_context_length() -> None:
    for kept in (-1, 3):
        request = ids(MANY, truncate_prompt_tokens=kept)
        job, _, longest_s = await turns_of(partial(parse_generate, request, LIMITS, 1000))
        (prompt,) = job.prompts
        assert prompt.ids.tolist() == list(request.tokenized.input_ids)[-1000:]
        assert job.truncate_to == kept and longest_s < 0.02


async def test_token_ids_must_fit_int32() -> None:
    request = vb.GenerateRequest(tokenized=vb.TokenizedInput(input_ids=[1, 2**31]))
    with pytest.raises(InvalidArgument, match="input_ids"):
        await parse_generate(request, LIMITS, CONTEXT)
    empty = await parse_generate(vb.GenerateRequest(tokenized=vb.TokenizedInput()), LIMITS, CONTEXT)
    assert isinstance(empty.prompts[0], TokenPrompt) and not len(empty.prompts[0].ids)


def test_abort_has_a_bounded_number_of_distinct_ids() -> None:
    assert aborted_ids(vb.AbortRequest(request_ids=["a", "b"] * (MAX_ABORTED // 2))) == {"a", "b"}
    many = vb.AbortRequest(request_ids=[""] * MANY)

    def convert() -> None:
        with pytest.raises(InvalidArgument) as caught:
            aborted_ids(many)
        assert (caught.value.code, caught.value.param) == ("TOO_MANY_ITEMS", "request_ids")

    assert least_cpu_s(convert) < 0.02
