"""Items of a response's input become the messages of a conversation; errors about tools name the fields of this API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire_common.errors import InvalidArgument
from quire_router.front.http.responses.parse import parse_response
from quire_router.front.parameters.request_limits import Limits
from quire_router.sequences.job import ChatPrompt


def messages_of(items: list[dict[str, Any]]) -> Any:
    limits = Limits(max_n=1, max_logprobs=0)
    asked = parse_response({"model": "m", "input": items}, limits, timings=False)
    (prompt,) = asked.request.job.prompts
    assert isinstance(prompt, ChatPrompt)
    return json.loads(prompt.messages_json)


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def test_reasoning_and_calls_join_one_message_of_the_assistant_and_nothing_is_lost() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    assert messages_of([{"role": "user", "content": "x"}, thought("a"), thought("b"), call, output]) == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "a\nb",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        ({"tools": [{"type": "function"}]}, "BAD_TOOL", "tools[0].name is"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "BAD_TYPE", "tools[0].parameters is"),
        ({"tool_choice": {"type": "function"}}, "BAD_TOOL_CHOICE", '{"type": "function", "name": ...}'),
    ],
)
def test_errors_about_tools_name_the_fields_of_the_responses_api(fields: dict[str, Any], code: str, names: str) -> None:
    limits = Limits(max_n=1, max_logprobs=0)
    with pytest.raises(InvalidArgument) as caught:
        parse_response({"model": "m", "input": "x", **fields}, limits, timings=False)
    assert caught.value.code == code
    assert names in f"{caught.value.message} {caught.value.fix}"
