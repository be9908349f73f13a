from __future__ import annotations

import json
from typing import Any

import pytest

from quire_common.errors import QuireError, Unsupported
from quire_tokenizer.chat.conversation import Conversation, parse_conversation


def parse(messages: Any, tools: Any = None, kwargs: Any = None) -> Conversation:
    return parse_conversation(
        json.dumps(messages),
        json.dumps(tools) if tools is not None else "",
        json.dumps(kwargs) if kwargs is not None else "",
    )


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_conversation_with_everything() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "<"]}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    found = parse(messages, [{"type": "function", "function": {"name": "f"}}], {"enable_thinking": False})
    assert found.messages[2]["tool_calls"][0]["function"]["arguments"] == {"x": [1, "<"]}
    assert found.messages[2]["reasoning_content"] == "hm"
    assert found.messages[1]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found.values["enable_thinking"] is False
    assert parse(user("x"), []).tools is None


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_tool_calls_without_arguments(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    found = parse([{"role": "assistant", "tool_calls": [call]}])
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "refusal", None])
def test_parts_that_are_not_text_are_refused_by_name(kind: str | None) -> None:
    with pytest.raises(Unsupported, match="UNSUPPORTED_CONTENT_PART") as caught:
        parse(user([{"type": "text", "text": "see"}, {"type": kind, "image_url": {"url": "http://example.com"}}]))
    assert str(kind) in caught.value.message
    assert "messages[0].content[1]" in caught.value.message


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "tools", "kwargs", "code"),
    [
        ([], None, None, "NO_MESSAGES"),
        ({}, None, None, "INVALID_JSON"),
        (["hi"], None, None, "BAD_MESSAGE"),
        ([{"role": "wizard", "content": "x"}], None, None, "BAD_ROLE"),
        ([{"role": ["user"], "content": "x"}], None, None, "BAD_ROLE"),
        ([{"content": "x"}], None, None, "BAD_ROLE"),
        ([{"role": "user"}], None, None, "NO_CONTENT"),
        ([{"role": "assistant", "content": None}], None, None, "NO_CONTENT"),
        (user(3), None, None, "BAD_CONTENT"),
        (user(["x"]), None, None, "BAD_CONTENT"),
        (user([{"type": "text"}]), None, None, "BAD_CONTENT"),
        ([{"role": "assistant", "tool_calls": [1]}], None, None, "BAD_TOOL_CALLS"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], None, None, "BAD_TOOL_CALLS"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            None,
            None,
            "INVALID_JSON",
        ),
        (user("x"), ["f"], None, "BAD_TOOL"),
        (user("x"), {}, None, "INVALID_JSON"),
        (user("x"), None, [], "INVALID_JSON"),
        (user("x"), None, {"messages": []}, "RESERVED_TEMPLATE_ARGUMENT"),
        (user("x"), None, {"bos_token": "<|im_end|>"}, "RESERVED_TEMPLATE_ARGUMENT"),
        (user("half \ud83d"), None, None, "INVALID_UNICODE"),
        (user("x"), None, {"a\udc00": 1}, "INVALID_UNICODE"),
        (user(chr(0x1D9FF)), None, None, "RESERVED_CHARACTER"),
        (user("x"), None, {"deep": nested(200)}, "JSON_TOO_DEEP"),
    ],
)
def test_bad_input(messages: Any, tools: Any, kwargs: Any, code: str) -> None:
    with pytest.raises(QuireError) as caught:
        parse(messages, tools, kwargs)
    assert caught.value.code == code
    assert caught.value.fix


@pytest.mark.parametrize(
    ("messages", "tools", "kwargs", "param"),
    [
        ([{"role": "user", "content": "x", "deep": nested(96)}], [{"a": nested(96)}], {"deep": nested(98)}, ""),
        ([{"role": "user", "content": "x", "deep": nested(97)}], None, None, "messages"),
        (user("x"), [{"a": nested(97)}], None, "tools"),
        (user("x"), None, {"deep": nested(99)}, "chat_template_kwargs"),
    ],
)
def test_error_of_too_deep_nesting_names_its_field(messages: Any, tools: Any, kwargs: Any, param: str) -> None:
    if not param:
        parse(messages, tools, kwargs)
        return
    with pytest.raises(QuireError, match=f"{param} is nested too deeply") as caught:
        parse(messages, tools, kwargs)
    assert (caught.value.code, caught.value.param) == ("JSON_TOO_DEEP", param)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '"\\u12"', "[1" + "0" * 5000 + "]"])
def test_broken_json(text: str) -> None:
    with pytest.raises(QuireError) as caught:
        parse_conversation(text, "", "")
    assert caught.value.code in ("INVALID_JSON", "JSON_TOO_DEEP", "BAD_MESSAGE")


def test_continuing_a_message_without_text() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(QuireError, match="NOTHING_TO_CONTINUE"):
        parse([{"role": "assistant", "tool_calls": [call]}]).marked_for_continuation()
