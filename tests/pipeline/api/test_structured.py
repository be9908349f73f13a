"""Structured output of the demo model through all services: what ends is valid, in every form, drawn or greedy."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from quire import Client, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "build", "parameters": ARGUMENTS}}


def chat(http: httpx.Client, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Build."}], "max_tokens": 300, "seed": 5, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def complete(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/completions", json={"prompt": "Build.", "max_tokens": 300, "seed": 5, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_follow_a_schema(http: httpx.Client, temperature: int) -> None:
    # The demo model, which learned verse, would write lines of spaces.
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    choices = complete(http, structured_outputs=form, temperature=temperature, n=4)
    texts = [choice["text"] for choice in choices]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4, texts
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    again = complete(http, structured_outputs=form, temperature=temperature, n=4)
    assert [choice["text"] for choice in again] == texts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        (
            {
                "structured_outputs": {"grammar": 'root ::= "x" root | "y"'},
            },
            "x*y",
        ),
        ({"guided_json": {"enum": ["a", 1]}}, '"a"|1'),
    ],
)
def test_answers_have_the_other_forms(http: httpx.Client, fields: dict[str, Any], pattern: str) -> None:
    ended = 0
    for seed in range(4):
        (choice,) = complete(http, temperature=1, **{**fields, "seed": seed})
        if choice["finish_reason"] == "stop":
            ended += 1
            assert re.fullmatch(pattern, choice["text"])
    assert ended


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "build"}}])
def test_required_calls_have_valid_arguments(http: httpx.Client, choice: Any) -> None:
    (answer,) = chat(http, tools=[TOOL], tool_choice=choice, temperature=1, parallel_tool_calls=False)
    assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "build"
    jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "build"}}])
def test_required_calls_over_grpc_are_those_over_http(http: httpx.Client, client: Client, choice: Any) -> None:
    (answer,) = chat(http, tools=[TOOL], tool_choice=choice, temperature=1, parallel_tool_calls=False)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300)
    messages = [{"role": "user", "content": "Build."}]
    output = client.chat(messages, params, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = output.outputs[0].tool_calls
    function = answer["message"]["tool_calls"][0]["function"]
    assert {"name": call.name, "arguments": call.arguments} == function and call.id
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")


def test_a_neighbour_is_as_without_company(http: httpx.Client) -> None:
    plain = {"prompt": "Shall I compare thee", "max_tokens": 20, "temperature": 0}
    alone = http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    structured = http.post("/v1/completions", json={**plain, "guided_regex": "[0-9]{8}"}).json()["choices"][0]
    assert re.fullmatch("[0-9]{8}", structured["text"]) and structured["finish_reason"] == "stop"
    assert http.post("/v1/completions", json=plain).json()["choices"][0]["text"] == alone
