"""Structured output in every API: what the tokenizer is asked to compile, what the engine gets, and who can take it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire.v1 import tokenizer_pb2 as tb
from quire_common.discovery.endpoint import Endpoint
from quire_common.errors import InvalidArgument, Unavailable, from_rpc_error
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_common.structured.constraint import LLGUIDANCE_VERSION, Constraint, constraint_to_pb
from quire_router.sequences.structured import PROMPT_ENDS
from tests.contract.router.test_router_messages import create
from tests.contract.router.test_router_smg import facade
from tests.contract.router.test_router_smg import request as smg_request
from tests.fakes.fake_tokenizer import FakeTokenizer
from tests.fakes.router.router_faults import until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
LEGACY_TAG = {"type": "structural_tag", "structures": [], "triggers": ["<"]}


def capable(**options: Any) -> FakeScheduler:
    return FakeScheduler(capabilities=["top_k", STRUCTURED_OUTPUT], **options)


def source(kind: str, text: str = "", **options: Any) -> pb.Constraint:
    return pb.Constraint(kind=kind, text=text, **options)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


OPTIONS = {"disable_any_whitespace": True, "disable_additional_properties": True, "whitespace_pattern": " ?"}
FORMS: list[tuple[dict[str, Any], pb.Constraint]] = [
    ({"response_format": {"type": "json_object"}}, source("json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
     source("json_schema", TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
     source("json_schema", TEXT, strict=True)),
    ({"response_format": TAG}, source("structural_tag", compact(TAG))),
    ({"response_format": LEGACY_TAG}, source("structural_tag", compact(LEGACY_TAG))),
    ({"structured_outputs": {"json": SCHEMA, **OPTIONS}}, source("json_schema", TEXT, **OPTIONS)),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, source("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, source("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "ü"], "json_object": False}}, source("choice", '["a","ü"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, source("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, source("json_object")),
    ({"structured_outputs": {"structural_tag": compact(TAG)}}, source("structural_tag", compact(TAG))),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, source("json_schema", TEXT, whitespace_pattern=" ")),
    ({"guided_regex": "a+"}, source("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, source("choice", '["a","b"]')),
    ({"guided_grammar": "start: /a/"}, source("grammar", "start: /a/")),
]  # fmt: skip


def engine_has(rig: RouterRig, asked: pb.Constraint) -> bool:
    """Whether the last submit has the grammar that the fake tokenizer makes of this source."""
    made = constraint_to_pb(Constraint.of(f"{asked.kind}: {asked.text}"))
    return bool(rig.scheduler.submits[-1].sequence.constraint == made)


@pytest.mark.parametrize("fields, asked", FORMS, ids=[f"{n}-{'-'.join(form[0])}" for n, form in enumerate(FORMS)])
async def test_every_form_over_http_reaches_tokenizer_and_engine(fields: dict[str, Any], asked: pb.Constraint) -> None:
    async with router_rig([capable()]) as rig:
        for route, reasoning in ((rig.complete, False), (rig.chat, True)):
            answer = await route("a", max_tokens=2, **fields)
            assert answer.status_code == 200, answer.text
            sent = rig.tokenizer.compiles[-1]
            assert (sent.constraint, sent.reasoning) == (asked, reasoning)
            assert engine_has(rig, asked)


async def test_text_is_free() -> None:
    async with router_rig() as rig:
        for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": None}, {"guided_regex": None}):
            assert (await rig.chat("a", max_tokens=1, **fields)).status_code == 200
        response = await rig.http.post(
            "/v1/responses", json={"input": "a", "max_output_tokens": 1, "text": {"format": {"type": "text"}}}
        )
        assert response.status_code == 200, response.text
        assert not rig.tokenizer.compiles and not rig.scheduler.submits[-1].sequence.HasField("constraint")


async def test_responses_and_messages_have_their_own_forms() -> None:
    flat = {"type": "json_schema", "schema": SCHEMA}
    async with router_rig([capable()]) as rig:
        for form, asked in (
            ({**flat, "name": "n", "strict": True}, source("json_schema", TEXT, strict=True)),
            ({"type": "json_object"}, source("json_object")),
        ):
            body = {"model": "fake", "input": "a", "max_output_tokens": 2, "text": {"format": form}}
            answer = await rig.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"]["format"] == form
            assert rig.tokenizer.compiles[-1].constraint == asked and engine_has(rig, asked)
        for fields in ({"output_config": {"format": flat}}, {"output_format": flat}):
            answer = await create(rig, **fields)
            assert answer.status_code == 200, answer.text
            assert rig.tokenizer.compiles[-1].constraint == source("json_schema", TEXT)
            assert rig.tokenizer.compiles[-1].reasoning
        both = await create(rig, output_config={"format": flat}, output_format=flat)
        assert both.status_code == 400


async def test_generate_and_render_speak_of_structures_alike() -> None:
    async with router_rig([capable()]) as rig:
        params = {"max_tokens": 2, "structured_outputs": {"choice": ["a", "b"], "disable_any_whitespace": True}}
        body = {"model": "fake", "token_ids": [97], "sampling_params": params}
        answer = await rig.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        asked = source("choice", '["a","b"]', disable_any_whitespace=True)
        assert rig.tokenizer.compiles[-1].constraint == asked
        rendered = await rig.http.post(
            "/v1/completions/render",
            json={"model": "fake", "prompt": "a", "max_tokens": 2, "structured_outputs": params["structured_outputs"]},
        )
        (made,) = rendered.json()
        assert made["sampling_params"]["structured_outputs"] == params["structured_outputs"]


@pytest.mark.parametrize("prompt_end, name", list(enumerate(PROMPT_ENDS)))
async def test_a_rendered_chat_is_compiled_as_the_chat_is(prompt_end: Any, name: str) -> None:
    async with router_rig([capable()]) as rig:
        rig.tokenizer.prompt_end = prompt_end
        form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        rendered = await rig.http.post("/v1/chat/completions/render", json={**body, "response_format": form})
        structured = rendered.json()["sampling_params"]["structured_outputs"]
        assert (structured["strict"], structured["prompt_end"]) == (True, name)
        answer = await rig.http.post("/inference/v1/generate", json=rendered.json())
        assert answer.status_code == 200, answer.text
        of_chat, of_rendered = rig.tokenizer.compiles
        of_chat.ClearField("context")
        of_rendered.ClearField("context")
        assert of_chat == of_rendered and of_chat.reasoning and of_chat.constraint.strict


async def test_an_unknown_end_of_a_prompt_is_refused() -> None:
    async with router_rig([capable()]) as rig:
        answer = await rig.complete("a", structured_outputs={"regex": "a", "prompt_end": "dreaming"})
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("BAD_VALUE", "structured_outputs.prompt_end")


async def test_grpc_takes_the_contracts_kinds() -> None:
    async with router_rig([capable()]) as rig:
        asked = source("json_schema", TEXT, strict=True, whitespace_pattern=" ")
        chat = ib.Chat(messages_json='[{"role": "user", "content": "a"}]')
        prompts: list[tuple[Any, bool]] = [({"text": "a"}, False), ({"chat": chat}, True)]
        for prompt, reasoning in prompts:
            request = ib.GenerateRequest(max_tokens=2, constraint=asked, **prompt)
            assert [response async for response in rig.inference.Generate(request)]
            sent = rig.tokenizer.compiles[-1]
            assert (sent.constraint, sent.reasoning) == (asked, reasoning) and engine_has(rig, asked)
        wrong: list[tuple[pb.Constraint, Any, str]] = [
            (source("llguidance", "start: /a/"), {}, "constraint.kind"),
            (asked, {"ignore_eos": True}, "ignore_eos"),
        ]
        for constraint, fields, param in wrong:
            request = ib.GenerateRequest(text="a", max_tokens=2, constraint=constraint, **fields)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                assert [response async for response in rig.inference.Generate(request)]
            assert from_rpc_error(caught.value).param == param


@pytest.mark.parametrize(
    "fields, asked",
    [
        ({"json_schema": TEXT}, source("json_schema", TEXT)),
        ({"regex": "a+"}, source("regex", "a+")),
        ({"grammar": "start: /a/"}, source("grammar", "start: /a/")),
        ({"structural_tag": compact(TAG)}, source("structural_tag", compact(TAG))),
        ({"json_object": True}, source("json_object")),
        ({"choice": {"choices": ["a", "b"]}}, source("choice", '["a", "b"]')),
    ],
)
async def test_vllms_grpc_takes_its_constraints(fields: dict[str, Any], asked: pb.Constraint) -> None:
    async with facade(capable()) as (rig, stub):
        assert [answer async for answer in stub.Generate(smg_request(sampling=fields))]
        assert rig.tokenizer.compiles[-1].constraint == asked and engine_has(rig, asked)


async def test_the_prompts_end_is_told_to_whoever_compiles() -> None:
    async with router_rig([capable()]) as rig:
        rig.tokenizer.prompt_end = tb.PROMPT_END_THINKING
        assert (await rig.chat("a", max_tokens=1, guided_regex="a")).status_code == 200
        assert rig.tokenizer.compiles[-1].prompt_end == tb.PROMPT_END_THINKING


FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]


@pytest.mark.parametrize(
    ("fields", "param", "called"),
    [
        ({}, "tools", "tools[].function.strict in"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice that forces"),
    ],
)
async def test_a_chat_whose_tools_cannot_be_rendered_is_refused_by_what_it_sent(
    fields: dict[str, str], param: str, called: str
) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.tool_parser = "hermes"
    async with router_rig([capable()], [tokenizer]) as rig:
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "tools": STRICT, **fields}
        answer = await rig.http.post("/v1/chat/completions/render", json=body)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("PARAMETER_UNSUPPORTED", param)
        assert error["message"].startswith(called)


async def test_demanded_calls_reach_tokenizer_and_engine_in_every_api() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.tool_parser = "hermes"
    async with router_rig([capable()], [tokenizer]) as rig:

        async def chat(tools: Any, **fields: Any) -> Any:
            return await rig.chat("a", max_tokens=1, tools=tools, **fields)

        async def respond(tools: Any, **fields: Any) -> Any:
            flat = [{"type": "function", **tool["function"]} for tool in tools]
            body = {"model": "fake", "input": "a", "max_output_tokens": 1, "tools": flat, **fields}
            return await rig.http.post("/v1/responses", json=body)

        async def message(tools: Any, **fields: Any) -> Any:
            uses = [{"name": "f", "input_schema": SCHEMA, **_strict(tool)} for tool in tools]
            return await create(rig, tools=uses, **fields)

        named = {"type": "function", "function": {"name": "f"}}
        cases: list[tuple[Any, Any, dict[str, Any], tuple[bool, str, bool]]] = [
            (chat, TOOLS, {"tool_choice": "required"}, (True, "", True)),
            (chat, TOOLS, {"tool_choice": named}, (True, "f", False)),
            (chat, STRICT, {}, (False, "", True)),
            (respond, TOOLS, {"tool_choice": "required", "parallel_tool_calls": False}, (True, "", False)),
            (respond, TOOLS, {"tool_choice": {"type": "function", "name": "f"}}, (True, "f", False)),
            (respond, STRICT, {}, (False, "", True)),
            (message, TOOLS, {"tool_choice": {"type": "any"}}, (True, "", True)),
            (message, TOOLS, {"tool_choice": {"type": "tool", "name": "f"}}, (True, "f", False)),
            (message, STRICT, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, (False, "", False)),
        ]
        for ask, tools, fields, demanded in cases:
            answer = await ask(tools, **fields)
            assert answer.status_code == 200, answer.text
            sent = rig.tokenizer.compiles[-1]
            assert sent.reasoning and (sent.tools.required, sent.tools.name, sent.tools.parallel) == demanded
            assert json.loads(sent.tools.tools_json)[0]["function"]["name"] == "f"
            constraint = rig.scheduler.submits[-1].sequence.constraint
            assert constraint.text == f"tools: {sent.tools.tools_json}"
        compiled = len(rig.tokenizer.compiles)
        assert (await chat(TOOLS)).status_code == 200 and len(rig.tokenizer.compiles) == compiled


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": True} if tool["function"].get("strict") else {}


async def test_a_refused_source_names_the_clients_field() -> None:
    async with router_rig([capable()]) as rig:
        rig.tokenizer.grammar_error = InvalidArgument("BAD_GRAMMAR", "It is no regex.", "Correct it.", param="regex")
        error = (await rig.complete("a", structured_outputs={"regex": "("})).json()["error"]
        assert (error["code"], error["param"]) == ("BAD_GRAMMAR", "structured_outputs.regex")
        assert not rig.scheduler.submits


FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
# Paths, bodies with a constraint, and the field that has it.
PLACES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
     "response_format.json_schema.schema"),
    ("/v1/completions", {"response_format": TAG}, "response_format"),
    ("/v1/completions", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ("/v1/completions", {"guided_json": SCHEMA}, "guided_json"),
    ("/v1/chat/completions", {"guided_regex": "a"}, "guided_regex"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
     "tool_choice"),
    ("/v1/responses", {"text": {"format": FLAT}}, "text.format.schema"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
     "output_config.format.schema"),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
    ("/inference/v1/generate", {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
]  # fmt: skip


def body_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request of this path with these fields."""
    if path.endswith("generate"):
        return {"model": "fake", "token_ids": [97], "sampling_params": {"max_tokens": 9, **fields}}
    said = [{"role": "user", "content": "a"}]
    asks = {
        "/v1/completions": {"prompt": "a", "max_tokens": 9},
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
    }
    return {"model": "fake", **asks.get(path, {"messages": said, "max_tokens": 9}), **fields}


@pytest.mark.parametrize(("path", "fields", "param"), PLACES, ids=[f"{path} {param}" for path, _, param in PLACES])
async def test_an_error_about_a_constraint_names_the_clients_field(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """Whether the tokenizer finds it or, while the answer is written, the engine."""
    code, body, tokenizer = "GRAMMAR_FAILED", body_for(path, fields), FakeTokenizer()
    tokenizer.tool_parser = "hermes"
    async with router_rig([capable()], [tokenizer]) as rig:
        rig.scheduler.gate.clear()
        answer = asyncio.ensure_future(rig.http.post(path, json=body))
        await until(lambda: bool(rig.scheduler.running))
        rig.scheduler.fail_all(code, grpc.StatusCode.INVALID_ARGUMENT, param="constraint")
        error = (await answer).json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        rig.tokenizer.grammar_error = InvalidArgument("BAD_GRAMMAR", "It is none.", "Correct it.", param="minItems")
        refused = await rig.http.post(path, json=body)
        error = refused.json()["error"]
        assert refused.status_code == 400 and (error["code"], error["param"]) == ("BAD_GRAMMAR", param)


async def test_what_is_refused_anyway_is_not_compiled() -> None:
    async with router_rig([capable()]) as rig:
        for fields, code in (
            ({"prompt": [1] * 4097}, "PROMPT_TOO_LONG"),
            ({"prompt": [300]}, "TOKEN_OUT_OF_RANGE"),
            ({"prompt": [1], "n": 128, "logprobs": 5, "max_tokens": 4000}, "PRODUCT_TOO_LARGE"),
        ):
            body = {"model": "fake", "max_tokens": 2, "guided_regex": "a+", **fields}
            answer = await rig.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
        assert not rig.tokenizer.compiles


async def test_a_large_grammar_of_many_sequences_is_refused() -> None:
    async with router_rig([capable()]) as rig:
        body = {"model": "fake", "prompt": [1], "n": 128, "max_tokens": 1, "guided_regex": "a" * (1 << 17)}
        error = (await rig.http.post("/v1/completions", json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("PRODUCT_TOO_LARGE", "n")
        assert not rig.scheduler.submits


async def test_a_compiling_process_that_fails_takes_no_tokenizer_away() -> None:
    async with router_rig([capable()]) as rig:
        rig.tokenizer.grammar_error = Unavailable("COMPILE_PROCESS_FAILED", "It did not start.", "Retry.")
        answer = await rig.complete("a", max_tokens=1, guided_regex="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "COMPILE_PROCESS_FAILED")
        assert len(rig.tokenizer.compiles) == 1
        assert (await rig.http.get("/readyz")).status_code == 200
        assert (await rig.complete("a", max_tokens=1)).status_code == 200


async def test_what_is_not_enforced_is_told_in_a_header() -> None:
    async with router_rig([capable()]) as rig:
        rig.tokenizer.grammar_warnings = ["uniqueItems is\nnot enforced", "format ü"]
        for stream in (False, True):
            answer = await rig.chat("a", max_tokens=1, guided_json={"uniqueItems": True}, stream=stream)
            assert answer.headers["x-quire-warnings"] == "uniqueItems is not enforced; format \\xfc"
        assert "x-quire-warnings" not in (await rig.chat("a", max_tokens=1)).headers


async def test_siblings_share_one_compiling() -> None:
    async with router_rig([capable()]) as rig:
        assert (await rig.complete(["a", "b"], n=3, max_tokens=1, guided_regex="a")).status_code == 200
        assert len(rig.tokenizer.compiles) == 1
        assert len({submit.sequence.constraint.digest for submit in rig.scheduler.submits}) == 1
        assert len(rig.scheduler.submits) == 6


async def test_constraints_go_to_replicas_that_apply_them_alone() -> None:
    plain, able = FakeScheduler(max_num_seqs=256), capable(max_num_seqs=1)
    async with router_rig([plain, able]) as rig:
        await until(lambda: all(fake.sessions for fake in (plain, able)))
        answers = await asyncio.gather(*(rig.complete("a", max_tokens=2, guided_regex="a") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert not plain.submits and len(able.submits) == 8


OTHER = "structured_output:llguidance-1.0.0"


async def test_a_constraint_goes_to_replicas_of_its_version_and_is_refused_where_there_is_none() -> None:
    """As while tokenizers and workers of two releases run beside each other."""
    older, newer, tokenizer = FakeScheduler(capabilities=[OTHER]), capable(), FakeTokenizer()
    async with router_rig([older, newer], [tokenizer]) as rig:
        await until(lambda: all(fake.sessions for fake in (older, newer)))
        for version, here, there in (("1.0.0", older, newer), (LLGUIDANCE_VERSION, newer, older)):
            tokenizer.grammar_version = version
            before = len(there.submits)
            assert (await rig.complete("a", max_tokens=2, guided_regex=f"a{version}")).status_code == 200
            assert here.submits[-1].sequence.constraint.version == version and len(there.submits) == before
        tokenizer.grammar_version = "2.0.0"
        answer = await rig.complete("a", max_tokens=2, guided_regex="b")
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("STRUCTURED_OUTPUT_UNSUPPORTED", "guided_regex")
        assert "2.0.0" in error["message"]


async def test_a_constraint_is_refused_once_all_replicas_that_apply_it_have_left() -> None:
    """The others have no reason to report anything meanwhile."""
    plain, able = FakeScheduler(), capable()
    async with router_rig([plain, able]) as rig:
        await until(lambda: all(fake.sessions for fake in (plain, able)))
        assert (await rig.complete("a", max_tokens=2, guided_regex="a")).status_code == 200
        host = rig.scheduler_hosts[0]
        rig.router.fleet.update([Endpoint(host.address, "scheduler", host.address)])
        answer = await rig.complete("a", max_tokens=2, guided_regex="a")
        assert answer.json()["error"]["code"] == "STRUCTURED_OUTPUT_UNSUPPORTED"
        assert (await rig.complete("a", max_tokens=2)).status_code == 200


@pytest.mark.parametrize("other", [[], [OTHER]], ids=["without", "of another version"])
async def test_a_constrained_sequence_moves_only_to_a_replica_that_applies_it(other: list[str]) -> None:
    lost, plain, able = capable(step_s=0.02), FakeScheduler(capabilities=other), capable(phase="loading")
    async with router_rig([lost, plain, able], migration_wait_s=30.0) as rig:
        await until(lambda: bool(lost.sessions and plain.sessions))
        running = asyncio.ensure_future(rig.complete("abcdef", max_tokens=20, guided_regex="a"))
        await until(lambda: any(run.sent for run in lost.running.values()))
        await rig.scheduler_hosts[0].stop()
        await asyncio.sleep(0.2)
        assert not plain.submits and not running.done()
        able.set_phase("ready")
        answer = await running
        assert answer.json()["choices"][0]["text"] == "abcdefabcdefabcdefab"
        assert len(able.submits) == 1 and not plain.submits
        taken_up = able.submits[0].sequence
        assert taken_up.output_ids and taken_up.constraint.text == "regex: a"
