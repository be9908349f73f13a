"""Anthropic's bodies: /v1/messages and its count_tokens, to jobs of the same kind as everybody's. Text blocks only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_router.front.http.parsing.parse import ParsedRequest, job_request
from quire_router.front.http.parsing.prompts import json_text, required, text_of_part
from quire_router.front.parameters.fields import bad_type, check_fields
from quire_router.front.parameters.tables import COUNT_TOKENS, MESSAGES, SAMPLING
from quire_router.sequences.job import ChatPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits

_ROLES = ("user", "assistant", "system")


def parse_messages(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> ParsedRequest:
    """Parse a body of /v1/messages. Less room in the context than `max_tokens` is no error, unlike in OpenAI's APIs.
    Raises InvalidArgument, Unsupported."""
    defaults = limits.sampling_defaults(body)
    values = check_fields(body, MESSAGES, defaults)
    return job_request(
        {**check_fields({}, SAMPLING, defaults), **values, "stop": values["stop_sequences"]},
        limits,
        prompts=(conversation_of(values),),
        logprobs=-1,
        logprobs_param="",
        max_tokens=None,
        default_max_tokens=required(values, "max_tokens"),
        timings=timings,
    )


def parse_count(body: Mapping[str, Any]) -> tuple[str, ChatPrompt]:
    """Parse a body of /v1/messages/count_tokens; return the model's name and the conversation to count. Raises
    InvalidArgument, Unsupported."""
    values = check_fields(body, COUNT_TOKENS)
    return values["model"], conversation_of(values)


def conversation_of(values: Mapping[str, Any]) -> ChatPrompt:
    """Make the conversation from checked fields, `system` first. A last message of the assistant is to be continued,
    which Anthropic calls prefill. Raises InvalidArgument, Unsupported."""
    messages = required(values, "messages")
    if not messages:
        raise InvalidArgument("MISSING_FIELD", "messages is empty.", "Send a message.", param="messages")
    found = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    continues = found[-1]["role"] == "assistant"
    if values["system"]:
        found.insert(0, {"role": "system", "content": _text(values["system"], "system")})
    kwargs = values["chat_template_kwargs"]
    return ChatPrompt(
        messages_json=json_text("messages", found),
        template_kwargs_json=json_text("chat_template_kwargs", kwargs) if kwargs else "",
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _message(message: Any, name: str) -> dict[str, str]:
    """Check a message; return its role and text. Raises InvalidArgument, and Unsupported for blocks other than text."""
    if not isinstance(message, dict):
        raise bad_type(name, message, "an object")
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidArgument(
            "BAD_ROLE", f"{name}.role is none of {', '.join(_ROLES)}.", "Send user or assistant.", param=f"{name}.role"
        )
    return {"role": role, "content": _text(message.get("content"), f"{name}.content")}


def _text(content: Any, name: str) -> str:
    """Return the text of a message. Blocks are joined without anything between them. Raises InvalidArgument,
    Unsupported."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_type(name, content, "a string or a list of blocks")
    return "".join(text_of_part(block, f"{name}[{i}]", "block") for i, block in enumerate(content))
