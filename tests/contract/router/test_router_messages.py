"""Anthropic's Messages API over real sockets: messages, the order of events, token counts, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def events(text: str) -> list[tuple[str, Any]]:
    """Name and data of each; both must agree."""
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        first, second = frame.split("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == name
        found.append((name, data))
    return found


async def create(rig: RouterRig, content: Any = "hi", **fields: Any) -> Any:
    body = {"model": "fake", "max_tokens": 6, "messages": [{"role": "user", "content": content}], **fields}
    return await rig.http.post("/v1/messages", json=body)


async def test_message_has_all_members() -> None:
    async with router_rig([FakeScheduler(cached_tokens=5)]) as rig:
        answer = await create(rig, system="be nice", temperature=0)
        assert answer.status_code == 200, answer.text
        prompt = len("system: be nice\nuser: hi\nassistant: ")
        assert answer.json() == {
            "id": f"msg_{answer.headers['x-request-id']}",
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": "system"}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 5,
                "output_tokens": 6,
            },
        }


async def test_events_come_in_anthropics_order() -> None:
    async with router_rig([FakeScheduler(step_s=0.005)]) as rig:
        answer = await create(rig, "é😀", stream=True, max_tokens=14, stop_sequences=["zz"])
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = [name for name, _ in events(answer.text)]
        body = [name for name in names if name != "content_block_delta"]
        assert body == [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        first, last = names.index("content_block_delta"), len(names) - 1 - names[::-1].index("content_block_delta")
        assert set(names[first : last + 1]) == {"content_block_delta"} and last - first >= 8
        told = dict(events(answer.text))
        assert told["message_start"]["message"]["content"] == []
        assert told["message_start"]["message"]["stop_reason"] is None
        assert told["message_start"]["message"]["usage"]["output_tokens"] == 0
        assert told["message_delta"]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert told["message_delta"]["usage"]["output_tokens"] == 14
        deltas = [data["delta"]["text"] for name, data in events(answer.text) if name == "content_block_delta"]
        assert "".join(deltas) == "user: é😀\na"


async def test_stop_sequence_is_reported() -> None:
    async with router_rig() as rig:
        told = (await create(rig, stop_sequences=["r:"])).json()
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "r:")
        assert told["content"] == [{"type": "text", "text": "use"}]
        streamed = dict(events((await create(rig, stop_sequences=["r:"], stream=True)).text))
        assert streamed["message_delta"]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "r:"}


async def test_end_of_sequence_gives_end_turn() -> None:
    async with router_rig([FakeScheduler(finish=1)]) as rig:
        assert (await create(rig)).json()["stop_reason"] == "end_turn"


async def test_max_tokens_may_exceed_the_context() -> None:
    async with router_rig([FakeScheduler(max_model_len=30)]) as rig:
        told = (await create(rig, max_tokens=4096)).json()
        assert told["stop_reason"] == "model_context_window_exceeded"
        assert told["usage"]["input_tokens"] + told["usage"]["output_tokens"] == 30


async def test_text_blocks_and_an_assistant_prefill_are_accepted() -> None:
    async with router_rig() as rig:
        blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "Sure"}]
        told = (await create(rig, messages=messages, system=[{"type": "text", "text": "s"}], max_tokens=40)).json()
        # The fake's template ends every message with a line break, also one that is continued, but opens no other.
        assert told["content"][0]["text"].startswith("system: s\nuser: ab\nassistant: Sure\n")
        assert told["usage"]["input_tokens"] == len("system: s\nuser: ab\nassistant: Sure\n")


async def test_count_tokens_equals_the_tokens_used() -> None:
    async with router_rig() as rig:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "system": "s"}
        answer = await rig.http.post("/v1/messages/count_tokens", json=body)
        assert answer.json() == {"input_tokens": len("system: s\nuser: hi\nassistant: ")}
        assert not rig.scheduler.submits
        told = (await create(rig, system="s")).json()
        assert told["usage"]["input_tokens"] == answer.json()["input_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"thinking": thinking}
            for thinking in ({}, {"type": "on"}, {"type": "enabled"}, {"type": "adaptive", "budget_tokens": 9})
        ),
        {"thinking": {"effort": 1}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        {"output_config": {"unknown": 1}},
        {"output_config": {"format": {"type": "yaml"}}},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": FORMAT}, "output_format": FORMAT},
    ],
    ids=str,
)
async def test_count_tokens_refuses_what_messages_refuse(fields: dict[str, Any]) -> None:
    async with router_rig() as rig:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}
        counted = await rig.http.post("/v1/messages/count_tokens", json=body)
        created = await rig.http.post("/v1/messages", json={**body, "max_tokens": 4})
        assert counted.status_code == created.status_code == 400
        assert counted.json()["error"] == created.json()["error"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "content[0]"),
        ({"model": "other"}, 404, "not_found_error", "`other` does not exist"),
        ({"tools": [{"type": "bash_20250124"}]}, 400, "invalid_request_error", "does not run tools itself"),
        ({"tools": [{"name": ""}]}, 400, "invalid_request_error", "tools[0].name is"),
        ({"tools": [{"name": "f", "input_schema": 1}]}, 400, "invalid_request_error", "tools[0].input_schema is"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "cannot apply"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "required"}}, 400, "invalid_request_error", '"any"'),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", '{"type": "tool", "name": ...}'),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "no parser for this model"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, 400, "invalid_request_error", "budget_tokens"),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 9}},
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "enabled, adaptive, disabled"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, 400, "invalid_request_error", "display"),
        ({"thinking": {}}, 400, "invalid_request_error", "enabled, adaptive, disabled"),
        ({"thinking": {"type": "enabled", "budget_token": 9}}, 400, "invalid_request_error", "'budget_token'"),
        ({"thinking": {"type": "disabled", "effort": 1}}, 400, "invalid_request_error", "'effort'"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}},
            400,
            "invalid_request_error",
            "tool_choice.disable_parallel_tool_use",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            400,
            "invalid_request_error",
            "content[0]",
        ),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"max_token": 3}, 400, "invalid_request_error", "Did you mean max_tokens?"),
    ],
)
async def test_errors_have_anthropics_shape(fields: dict[str, Any], status: int, kind: str, says: str) -> None:
    async with router_rig() as rig:
        answer = await create(rig, **fields)
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert says in told["error"]["message"]
        assert told["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]


async def test_errors_before_parsing_have_anthropics_shape() -> None:
    async with router_rig(api_key=("k",), max_body_bytes=2048) as rig:
        bare = await create(rig)
        assert (bare.status_code, bare.json()["error"]["type"]) == (401, "authentication_error")
        large = await rig.http.post("/v1/messages", content=b"x" * 3000, headers={"x-api-key": "k"})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        wrong = await rig.http.get("/v1/messages", headers={"x-api-key": "k"})
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        other = await rig.http.get("/v1/messagesx", headers={"x-api-key": "k"})
        assert "type" not in other.json()


async def test_overload_has_anthropics_status() -> None:
    async with router_rig(migration_wait_s=0.1) as rig:
        await rig.scheduler_hosts[0].stop()
        answer = await create(rig)
        assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
        assert int(answer.headers["retry-after"]) >= 1


async def test_error_during_a_stream_is_the_last_event() -> None:
    async with router_rig([FakeScheduler(step_s=0.01)], request_timeout_s=2.0) as rig:
        told = events((await create(rig, stream=True, max_tokens=3000)).text)
        assert told[-1][0] == "error" and told[-1][1]["error"]["type"] == "timeout_error"
        assert "message_stop" not in dict(told)
