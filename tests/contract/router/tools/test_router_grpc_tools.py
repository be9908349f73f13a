"""Tool calls and reasoning over gRPC: the same as over HTTP, resumed behind any response, and refused with a cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire import (
    AsyncClient,
    ChatPrompt,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    wire,
)
from quire.columns import pack_i32
from quire.errors import InvalidArgument
from quire.v1 import inference_pb2 as ib
from tests.contract.router.test_router_structured import capable
from tests.contract.router.tools.test_router_tools import CALL, TOOLS, WRITTEN, ask, count, raw, rig
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import STOP, FakeScheduler

MESSAGES = [{"role": "user", "content": "x"}]
SEPARATE = ib.AnswerParts(reasoning=True, tool_calls=True)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": "a", "tool_choice": ib.ToolChoice(mode=ib.TOOL_CHOICE_MODE_REQUIRED)}, "NO_CHAT"),
    ({"text": "a", "parts": SEPARATE}, "NO_CHAT"),
    ({"text": "a", "parallel_tool_calls": False}, "NO_CHAT"),
    ({"tools": "{", "parts": SEPARATE}, "BAD_JSON"),
    ({"tools": "{}"}, "BAD_TYPE"),
    ({"tools": "[1]"}, "BAD_TYPE"),
    ({"tools": json.dumps(TOOLS * 2)}, "DUPLICATE_TOOL"),
    ({"tools": "[" + "1," * 1024 + "1]"}, "TOO_MANY_ITEMS"),
    ({"tools": '["' + "x" * (1 << 20) + '"]'}, "TOO_MANY_ITEMS"),
    ({"tool_choice": ib.ToolChoice(mode=ib.TOOL_CHOICE_MODE_REQUIRED)}, "CONTRADICTION"),
    ({"tools": json.dumps(TOOLS), "tool_choice": ib.ToolChoice(name="get_weather")}, "CONTRADICTION"),
    (
        {
            "tools": json.dumps(TOOLS),
            "tool_choice": ib.ToolChoice(mode=ib.TOOL_CHOICE_MODE_REQUIRED, name="find"),
        },
        "UNKNOWN_TOOL",
    ),
    ({"tool_choice": ib.ToolChoice(mode=9)}, "BAD_VALUE"),  # type: ignore[arg-type]  # a number of a later version
]


def prompt(written: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(MESSAGES, **{"tools": TOOLS, "separate": True, "chat_template": raw(written), **fields})


async def complete(router: RouterRig, written: str, **fields: Any) -> RequestOutput:
    async with AsyncClient(router.grpc_address) as client:
        params = SamplingParams(max_tokens=await count(router, written))
        return await client.complete(prompt(written, **fields), params, request_id="one")


def shown(output: CompletionOutput) -> tuple[str, str, list[tuple[str, str, str]]]:
    return output.text, output.reasoning, [(call.id, call.name, call.arguments) for call in output.tool_calls]


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
async def test_parts_are_those_of_http(tmp_path: Path, tokens_per_step: int) -> None:
    scheduler = FakeScheduler(finish=STOP, vocab_size=500, tokens_per_step=tokens_per_step)
    async with rig(tmp_path, scheduler) as router:
        answer = await ask(router, WRITTEN, tools=TOOLS, request_id="one")
        message, usage = answer["choices"][0]["message"], answer["usage"]
        output = await complete(router, WRITTEN)
        calls = [(call["id"], *call["function"].values()) for call in message["tool_calls"]]
        assert shown(output.outputs[0]) == (message["content"], message["reasoning"], calls)
        assert len(calls) == 2 and output.outputs[0].finish_reason == "stop"
        assert output.usage is not None
        assert output.usage.reasoning_tokens == usage["completion_tokens_details"]["reasoning_tokens"]


async def test_an_answer_is_one_text_unless_parts_are_wanted(tmp_path: Path) -> None:
    async with rig(tmp_path) as router:
        (output,) = (await complete(router, WRITTEN, separate=False)).outputs
        assert shown(output) == (WRITTEN, "", [])
        (output,) = (await complete(router, CALL % "Rome", tool_choice="none")).outputs
        assert shown(output) == (CALL % "Rome", "", [])


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("parallel", [True, False])
async def test_a_stream_is_resumed_behind_each_response(tmp_path: Path, parallel: bool, every: int) -> None:
    """Behind each seventh one, and in the deep tests behind each."""
    async with rig(tmp_path, FakeScheduler(finish=STOP, vocab_size=500, tokens_per_step=1)) as router:
        params = SamplingParams(max_tokens=await count(router, WRITTEN))
        asked = prompt(WRITTEN, parallel_tool_calls=parallel)
        request = wire.build_request(asked, params, request_id="one", return_token_ids=True)
        deltas = [wire.read_response(each, "") async for each in router.inference.Generate(request)]
        whole = RequestOutput()
        for delta in deltas:
            whole.add(delta)
        assert len(whole.outputs[0].tool_calls) == 1 + parallel
        assert any(delta.hidden_characters for delta in deltas) is not parallel
        for had in range(1, len(deltas), every):
            output = RequestOutput()
            for delta in deltas[:had]:
                output.add(delta)
            ids = output.outputs[0].token_ids
            if len(ids) == len(whole.outputs[0].token_ids):
                break
            request.resume.output_ids = pack_i32(ids, "resume")
            request.resume.characters = sum(delta.characters for delta in deltas[:had])
            async for response in router.inference.Generate(request):
                output.add(wire.read_response(response, ""))
            assert shown(output.outputs[0]) == shown(whole.outputs[0]), had


async def test_fields_that_cannot_be_are_refused_with_a_cause() -> None:
    async with router_rig([capable()]) as router:
        for fields, code in REFUSED:
            fields = dict(fields)
            if "text" not in fields:
                fields["chat"] = ib.Chat(messages_json=json.dumps(MESSAGES), tools_json=fields.pop("tools", ""))
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                _ = [each async for each in router.inference.Generate(ib.GenerateRequest(**fields))]
            error = wire.read_error(failed.value, "")
            assert isinstance(error, InvalidArgument) and error.code == code and error.param and error.fix, fields


async def test_calls_are_demanded_of_tokenizer_and_engine_as_over_http() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.tool_parser = "hermes"
    named = {"type": "function", "function": {"name": "get_weather"}}
    function: Any = TOOLS[0]["function"]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    async with router_rig([capable()], [tokenizer]) as router, AsyncClient(router.grpc_address) as client:
        cases: list[dict[str, Any]] = [{"tool_choice": "required"}, {"tool_choice": named}, {"tools": strict}, {}]
        for fields in cases:
            wanted: dict[str, Any] = {"tools": TOOLS, **fields}
            assert (await router.chat("x", max_tokens=1, **wanted)).status_code == 200
            await client.chat(MESSAGES, SamplingParams(max_tokens=1), **wanted)
            over_http, over_grpc = (each.sequence.constraint for each in router.scheduler.submits[-2:])
            assert bool(over_http.text) == bool(fields) and over_http == over_grpc
            if fields:
                first, second = tokenizer.compiles[-2:]
                assert (first.tools, first.reasoning) == (second.tools, second.reasoning)
        form = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
        with pytest.raises(InvalidArgument, match="say what the answer must match"):
            await client.chat(MESSAGES, form, tools=TOOLS, tool_choice="required")
        with pytest.raises(InvalidArgument, match="ignore_eos"):
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            await client.chat(MESSAGES, params, tools=TOOLS, tool_choice="required")
        with pytest.raises(InvalidArgument, match="tool_choice is 3"):
            await client.chat(MESSAGES, form, tools=TOOLS, tool_choice=3)  # type: ignore[arg-type]  # a wrong type


async def test_tools_without_a_parser_are_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, tool_call_parser="none") as router:
        with pytest.raises(InvalidArgument, match="no parser for this model"):
            await complete(router, "x")
