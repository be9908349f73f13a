"""Chats whose answers think and call tools: a real tokenizer, and a scheduler that repeats the prompt, which is what a
model writes here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.router.test_router_messages import events
from tests.contract.tokenizer.test_tokenizer_service import serving_at
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import STOP, FakeScheduler
from tests.unit.tokenizer import folders

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
WRITTEN = "<think>\nWhich city?\n</think>\n\nI look.\n" + CALL % "Paris" + "\n" + CALL % "Nîmes"


@asynccontextmanager
async def rig(tmp_path: Path, scheduler: FakeScheduler | None = None, **options: Any) -> AsyncIterator[RouterRig]:
    folder = folders.write_folder(tmp_path / "tiny")
    options = {"tool_call_parser": "hermes", **options, "render_timeout_s": 30.0, "allow_request_chat_template": True}
    made = scheduler or FakeScheduler(finish=STOP, vocab_size=500)
    async with (
        serving_at(folder, load=True, **options) as first,
        serving_at(folder, load=True, **options) as second,
        router_rig([made], [], further_tokenizers=(first, second)) as router,
    ):
        yield router


async def count(router: RouterRig, written: str) -> int:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "chat_template": raw(written)}
    return int((await router.http.post("/tokenize", json=body)).json()["count"])


def raw(written: str) -> str:
    """A template that writes this, special tokens included."""
    return "{% raw %}" + written + "{% endraw %}"


async def ask(router: RouterRig, written: str, **fields: Any) -> Any:
    """The answer of a model that writes this."""
    body = {"max_tokens": await count(router, written), "chat_template": raw(written), **fields}
    response = await router.chat("x", **body)
    if not fields.get("stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the deltas of a stream together, as OpenAI's clients do."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    message[key] = message.get(key, "") + value
                    continue
                for piece in value:
                    call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
                    call |= {name: piece[name] for name in ("id", "type") if name in piece}
                    for name, text in piece["function"].items():
                        call["function"][name] += text
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return message | ({"tool_calls": [calls[at] for at in sorted(calls)]} if calls else {})


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
async def test_reasoning_content_and_calls_come_apart_whole_and_streamed(tmp_path: Path, tokens_per_step: int) -> None:
    scheduler = FakeScheduler(finish=STOP, vocab_size=500, tokens_per_step=tokens_per_step)
    async with rig(tmp_path, scheduler) as router:
        answer = await ask(router, WRITTEN, tools=TOOLS, request_id="one")
        (choice,) = answer["choices"]
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"] == "Which city?"
        assert message["content"] == "I look."
        calls = [
            (call["type"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
        ]
        assert calls == [
            ("function", "get_weather", json.dumps({"city": city}, ensure_ascii=False)) for city in ("Paris", "Nîmes")
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert choice["finish_reason"] == "tool_calls"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2
        streamed = joined(await ask(router, WRITTEN, tools=TOOLS, request_id="one", stream=True))
        kept = {name: message[name] for name in ("content", "reasoning", "reasoning_content", "tool_calls")}
        assert {name: streamed[name] for name in kept} == kept
        assert streamed["finish_reason"] == "tool_calls"


async def test_an_answer_that_is_cut_within_a_call_ends_as_length(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeScheduler(vocab_size=500)) as router:
        (choice,) = (await ask(router, "Now: " + (CALL % "Paris")[:60], tools=TOOLS))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_without_tools_or_with_none_calls_are_content(tmp_path: Path) -> None:
    async with rig(tmp_path) as router:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = (await ask(router, CALL % "Paris", **fields))["choices"]
            assert choice["message"]["content"] == CALL % "Paris"
            assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


async def test_reasoning_can_be_left_out_and_calls_be_limited_to_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as router:
        fields = {"tools": TOOLS, "include_reasoning": False, "parallel_tool_calls": False}
        (choice,) = (await ask(router, WRITTEN, **fields))["choices"]
        assert "reasoning" not in choice["message"] and len(choice["message"]["tool_calls"]) == 1
        streamed = joined(await ask(router, WRITTEN, **fields, stream=True))
        assert "reasoning" not in streamed and len(streamed["tool_calls"]) == 1


async def test_a_prompt_that_ends_within_reasoning_makes_the_answer_begin_there(tmp_path: Path) -> None:
    async with rig(tmp_path) as router:
        (choice,) = (await ask(router, "Hm.</think>Yes.<think>\n"))["choices"]
        assert choice["message"]["reasoning"] == "Hm."
        (choice,) = (await ask(router, "Hm.</think>Yes."))["choices"]
        assert "reasoning" not in choice["message"]


async def test_tools_without_a_parser_are_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, tool_call_parser="none") as router:
        error = await router.chat("x", tools=TOOLS)
        assert error.status_code == 400
        assert error.json()["error"]["code"] == "NO_TOOL_PARSER"
        message = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        anthropic = await router.http.post("/v1/messages", json={**message, "tools": tools})
        assert anthropic.status_code == 400
        for refused in (error, anthropic):
            said = refused.json()["error"]["message"]
            assert said.endswith("or leave the tools out."), "which each API can do"


async def test_logprobs_and_token_ids_come_with_the_last_chunk_of_their_tokens(tmp_path: Path) -> None:
    scheduler = FakeScheduler(finish=STOP, vocab_size=500, tokens_per_step=9)
    async with rig(tmp_path, scheduler) as router:
        chunks = await ask(router, WRITTEN, tools=TOOLS, stream=True, return_token_ids=True, logprobs=True)
        ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids") or []]
        entries = [
            e
            for chunk in chunks
            for choice in chunk["choices"]
            for e in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert len(ids) == len(entries) == await count(router, WRITTEN)


ANTHROPIC_TOOLS = [{"name": "get_weather", "input_schema": SCHEMA}]


async def create(router: RouterRig, written: str, **fields: Any) -> Any:
    """The message of a model that writes this: a scheduler that repeats the prompt, which is the conversation."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": ANTHROPIC_TOOLS, **fields}
    return await router.http.post("/v1/messages", json={"max_tokens": await count(router, written), **body})


@asynccontextmanager
async def writing(tmp_path: Path, written: str) -> AsyncIterator[RouterRig]:
    """A router to a model that writes this: its chat template is what is repeated."""
    template = tmp_path / "template"
    template.write_text(raw(written))
    async with rig(tmp_path, chat_template=str(template)) as router:
        yield router


async def test_anthropics_message_has_thinking_text_and_uses_of_tools(tmp_path: Path) -> None:
    async with writing(tmp_path, WRITTEN) as router:
        message = (await create(router, WRITTEN)).json()
        assert message["stop_reason"] == "tool_use"
        thinking, text, *uses = message["content"]
        assert thinking == {"type": "thinking", "thinking": "Which city?", "signature": ""}
        assert text == {"type": "text", "text": "I look."}
        assert [(use["type"], use["name"], use["input"]) for use in uses] == [
            ("tool_use", "get_weather", {"city": "Paris"}),
            ("tool_use", "get_weather", {"city": "Nîmes"}),
        ]
        assert len({use["id"] for use in uses}) == 2
        without = (await create(router, WRITTEN, thinking={"type": "disabled"})).json()
        assert [block["type"] for block in without["content"]] == ["text", "tool_use", "tool_use"]
        free = (await create(router, WRITTEN, thinking={"type": "adaptive", "display": "summarized"})).json()
        assert free["content"][0] == thinking
        one = (await create(router, WRITTEN, tool_choice={"type": "auto", "disable_parallel_tool_use": True})).json()
        assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]


async def test_anthropics_events_begin_and_end_each_block(tmp_path: Path) -> None:
    async with writing(tmp_path, WRITTEN) as router:
        told = events((await create(router, WRITTEN, stream=True)).text)
        blocks: list[dict[str, Any]] = []
        running = None
        for name, data in told:
            if name == "content_block_start":
                assert running is None and data["index"] == len(blocks)
                running = data["index"]
                blocks.append(data["content_block"] | {"json": ""})
            elif name == "content_block_delta":
                assert data["index"] == running
                kind, value = data["delta"]["type"], list(data["delta"].values())[1]
                member = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
                blocks[-1][member] += value
            elif name == "content_block_stop":
                assert data["index"] == running
                running = None
        assert running is None
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Which city?", "I look.")
        assert [json.loads(block["json"]) for block in blocks[2:]] == [{"city": "Paris"}, {"city": "Nîmes"}]
        assert dict(told)["message_delta"]["delta"]["stop_reason"] == "tool_use"


async def test_anthropics_results_of_tools_reach_the_template_as_messages_of_their_own(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m | tojson }};{% endfor %}{{ tools | tojson }}")
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    async with rig(tmp_path, FakeScheduler(vocab_size=500), chat_template=str(template)) as router:
        answer = (await create(router, "x", messages=messages, max_tokens=2000)).json()
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        shown = [json.loads(each) for each in text.split(";")[:4]]
        assert [message["role"] for message in shown] == ["user", "assistant", "tool", "user"]
        assert shown[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
        assert shown[1]["content"] == "I look." and shown[1]["reasoning_content"] == "Hm."
        assert shown[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"}
        assert shown[3]["content"] == "And now?"
        assert json.loads(text.split(";")[4].split("]")[0] + "]")[0]["function"]["name"] == "get_weather"


FUNCTIONS = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]


async def respond(router: RouterRig, written: str, **fields: Any) -> Any:
    body = {"model": "fake", "input": "x", "tools": FUNCTIONS, **fields}
    return await router.http.post("/v1/responses", json={"max_output_tokens": await count(router, written), **body})


async def test_a_response_has_items_of_reasoning_text_and_calls(tmp_path: Path) -> None:
    async with writing(tmp_path, WRITTEN) as router:
        answer = (await respond(router, WRITTEN)).json()
        assert answer["status"] == "completed"
        reasoning, message, *calls = answer["output"]
        assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "Which city?"
        assert message["type"] == "message" and message["content"][0]["text"] == "I look."
        assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("function_call", "get_weather", {"city": "Paris"}),
            ("function_call", "get_weather", {"city": "Nîmes"}),
        ]
        assert len({item["id"] for item in answer["output"]}) == len(answer["output"]) == 4
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 2


async def test_a_responses_events_make_its_items(tmp_path: Path) -> None:
    async with writing(tmp_path, WRITTEN) as router:
        told = events((await respond(router, WRITTEN, stream=True)).text)
        assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
        items: list[dict[str, Any]] = []
        texts: dict[int, str] = {}
        for name, data in told:
            if name == "response.output_item.added":
                assert data["output_index"] == len(items) and data["item"]["status"] == "in_progress"
                items.append(data["item"])
            elif name.endswith(".delta"):
                assert data["item_id"] == items[-1]["id"] and data["output_index"] == len(items) - 1
                texts[data["output_index"]] = texts.get(data["output_index"], "") + data["delta"]
            elif name == "response.output_item.done":
                assert data["item"]["id"] == items[-1]["id"] and data["item"]["status"] == "completed"
        assert list(texts.values()) == ["Which city?", "I look.", '{"city": "Paris"}', '{"city": "Nîmes"}']
        done = dict(told)["response.completed"]["response"]["output"]
        assert [item["id"] for item in done] == [item["id"] for item in items]


async def test_a_response_goes_on_from_calls_and_their_outputs(tmp_path: Path) -> None:
    template = tmp_path / "template"
    shown = "{% for m in messages %}{{ m | tojson }};{% endfor %}"
    template.write_text("{% if messages | length == 1 %}" + raw(WRITTEN) + "{% else %}" + shown + "{% endif %}")
    async with rig(tmp_path, chat_template=str(template)) as router:
        first = (await respond(router, WRITTEN)).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
        given = [{"role": "user", "content": "x"}, *first["output"], *outputs]
        for fields in ({"input": outputs, "previous_response_id": first["id"]}, {"input": given}):
            answer = (await respond(router, WRITTEN, max_output_tokens=1000, **fields)).json()
            text = "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
            messages = [json.loads(each) for each in text.split(";")[:4]]
            assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
            assert messages[1]["content"] == "I look." and messages[1]["reasoning_content"] == "Which city?"
            made = [call["function"] for call in messages[1]["tool_calls"]]
            assert made == [{"name": "get_weather", "arguments": {"city": city}} for city in ("Paris", "Nîmes")]
            assert [message["tool_call_id"] for message in messages[2:]] == [call["call_id"] for call in calls]
