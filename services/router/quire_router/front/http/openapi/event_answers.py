"""Schemas of Anthropic's messages and of OpenAI's responses, with the typed events of their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.front.http.openapi.schemas import (
    ANY,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    array,
    closed,
    const,
    either,
    maybe,
    one_of,
    ref,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.http.openapi.schemas import Schema

_STOP = {
    "stop_reason": maybe(
        one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
    ),
    "stop_sequence": maybe(STRING),
}
_BLOCK = either(
    closed({"type": const("text"), "text": STRING}),
    closed({"type": const("thinking"), "thinking": STRING, "signature": STRING}),
    closed({"type": const("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
)
_BLOCK_DELTA = either(
    closed({"type": const("text_delta"), "text": STRING}),
    closed({"type": const("thinking_delta"), "thinking": STRING}),
    closed({"type": const("input_json_delta"), "partial_json": STRING}),
)
_STATUS = one_of("in_progress", "completed", "incomplete", "failed", "cancelled")
_WHERE = {"item_id": STRING, "output_index": INTEGER, "content_index": INTEGER}
_OF_CALL = {"item_id": STRING, "output_index": INTEGER}
_THOUGHT = closed({"type": const("reasoning_text"), "text": STRING})
_LOGPROBS = array(ref("ChatLogprob"))
_PART = closed(
    {"type": const("output_text"), "text": STRING, "annotations": array(ANY), "logprobs": _LOGPROBS},
)


def _typed(kind: str, members: Mapping[str, Schema]) -> Schema:
    return closed({"type": const(kind), **members})


def _numbered(kind: str, members: Mapping[str, Schema]) -> Schema:
    return closed({"type": const(f"response.{kind}"), "sequence_number": INTEGER, **members})


EVENT_ANSWERS: Mapping[str, Schema] = {
    "AnthropicError": closed(
        {
            "type": const("error"),
            "error": closed({"type": STRING, "message": STRING, "code": STRING, "param": maybe(STRING)}),
            "request_id": STRING,
        }
    ),
    "MessageUsage": closed(
        {
            "input_tokens": INTEGER,
            "cache_creation_input_tokens": INTEGER,
            "cache_read_input_tokens": INTEGER,
            "output_tokens": INTEGER,
        }
    ),
    "Message": closed(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(_BLOCK),
            **_STOP,
            "usage": ref("MessageUsage"),
        }
    ),
    "MessageEvent": either(
        _typed("message_start", {"message": ref("Message")}),
        _typed("content_block_start", {"index": INTEGER, "content_block": _BLOCK}),
        _typed("ping", {}),
        _typed(
            "content_block_delta",
            {"index": INTEGER, "delta": _BLOCK_DELTA},
        ),
        _typed("content_block_stop", {"index": INTEGER}),
        _typed("message_delta", {"delta": closed(_STOP), "usage": ref("MessageUsage")}),
        _typed("message_stop", {}),
        ref("AnthropicError"),
    ),
    "TokenCount": closed({"input_tokens": INTEGER}),
    "ResponseItem": either(
        closed(
            {
                "id": STRING,
                "type": const("message"),
                "role": const("assistant"),
                "status": _STATUS,
                "content": array(_PART),
            }
        ),
        closed(
            {
                "id": STRING,
                "type": const("reasoning"),
                "status": _STATUS,
                "summary": array(ANY),
                "content": array(_THOUGHT),
            }
        ),
        closed(
            {
                "id": STRING,
                "type": const("function_call"),
                "status": _STATUS,
                "call_id": STRING,
                "name": STRING,
                "arguments": STRING,
            }
        ),
    ),
    "Response": closed(
        {
            "id": STRING,
            "object": const("response"),
            "created_at": INTEGER,
            "status": _STATUS,
            "error": maybe(closed({"code": STRING, "message": STRING})),
            "incomplete_details": maybe(closed({"reason": STRING})),
            "model": STRING,
            "output": array(ref("ResponseItem")),
            "usage": maybe(
                closed(
                    {
                        "input_tokens": INTEGER,
                        "input_tokens_details": closed({"cached_tokens": INTEGER}),
                        "output_tokens": INTEGER,
                        "output_tokens_details": closed({"reasoning_tokens": INTEGER}),
                        "total_tokens": INTEGER,
                    }
                )
            ),
            "background": BOOLEAN,
            "store": BOOLEAN,
            "service_tier": STRING,
            "reasoning": OBJECT,
            "text": OBJECT,
            "metadata": maybe(ANY),
            "tool_choice": either(STRING, OBJECT),
            "tools": array(ANY),
            "parallel_tool_calls": BOOLEAN,
            "instructions": maybe(STRING),
            "max_output_tokens": maybe(INTEGER),
            "previous_response_id": maybe(STRING),
            "prompt_cache_key": ANY,
            "safety_identifier": ANY,
            "temperature": NUMBER,
            "top_logprobs": maybe(INTEGER),
            "top_p": NUMBER,
            "truncation": STRING,
            "user": ANY,
        }
    ),
    "ResponseDeleted": closed({"id": STRING, "object": const("response"), "deleted": BOOLEAN}),
    "ResponseEvent": either(
        *(
            _numbered(kind, {"response": ref("Response")})
            for kind in ("created", "in_progress", "completed", "incomplete", "failed")
        ),
        *(
            _numbered(kind, {"output_index": INTEGER, "item": ref("ResponseItem")})
            for kind in ("output_item.added", "output_item.done")
        ),
        *(
            _numbered(kind, {**_WHERE, "part": either(_PART, _THOUGHT)})
            for kind in ("content_part.added", "content_part.done")
        ),
        _numbered("reasoning_text.delta", {**_WHERE, "delta": STRING}),
        _numbered("reasoning_text.done", {**_WHERE, "text": STRING}),
        _numbered("function_call_arguments.delta", {**_OF_CALL, "delta": STRING}),
        _numbered("function_call_arguments.done", {**_OF_CALL, "name": STRING, "arguments": STRING}),
        _numbered("output_text.delta", {**_WHERE, "delta": STRING, "logprobs": _LOGPROBS}),
        _numbered("output_text.done", {**_WHERE, "text": STRING, "logprobs": _LOGPROBS}),
    ),
}
