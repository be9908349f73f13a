"""Converts a body of /v1/responses to a job, and to the fields that the response object echoes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument, Unsupported
from quire_common.sequence import unsupported
from quire_router.front.http.parsing.parse import ParsedRequest, job_request
from quire_router.front.http.parsing.prompts import joined_lists, required, string_member
from quire_router.front.http.parsing.structured_fields import of_output_format
from quire_router.front.http.responses.document import echoed_fields
from quire_router.front.http.responses.output_items import tool_call
from quire_router.front.parameters.fields import bad_type, check_fields, json_text
from quire_router.front.parameters.tables import RESPONSE_REASONING, RESPONSE_TEXT, RESPONSES, SAMPLING
from quire_router.front.parameters.tool_fields import ToolForm, demanded_calls, parsing_of, tools_of
from quire_router.sequences.job import ChatPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits

LOGPROBS = "message.output_text.logprobs"
# The values of OpenAI's API. No answer of Quire has what the others name, so they change nothing.
_INCLUDABLE = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
_FUNCTION = ("name", "description", "parameters", "strict")
_TOOLS = ToolForm(
    {member: member for member in _FUNCTION},
    'Send auto, none, required, or {"type": "function", "name": ...}.',
)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A checked body. `request` has only its instructions and its input; the messages of a previous response come
    between these two. `echoed` has fields of the response object, as JSON."""

    request: ParsedRequest
    instructions_json: str
    """A list of at most one message."""
    messages_json: str
    previous: str | None
    """The id of the response that this one goes on from, if any."""
    background: bool
    store: bool
    echoed: tuple[tuple[str, str], ...]

    def with_history(self, history_json: str) -> ParsedRequest:
        """Return the request with the messages of previous responses, a JSON list, between the instructions and the
        input."""
        prompts = tuple(
            replace(each, messages_json=joined_lists(self.instructions_json, history_json, self.messages_json))
            for each in self.request.job.prompts
            if isinstance(each, ChatPrompt)
        )
        return replace(self.request, job=replace(self.request.job, prompts=prompts))


def parse_response(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> AskedResponse:
    """Check a body of /v1/responses, and convert it to a job and to the fields that the response object echoes. A
    response is stored unless `store` is false. Raises InvalidArgument for missing, unknown or wrong fields. Raises
    Unsupported for a stream in the background, for fields, tools, items and parts that Quire lacks, and for more
    logprobs than the router returns. `timings` is not used."""
    values = check_fields(body, RESPONSES, limits.sampling_defaults(body))
    of_output_format(check_fields(values["text"] or {}, RESPONSE_TEXT)["format"], "text.format")
    check_fields(values["reasoning"] or {}, RESPONSE_REASONING)
    if values["truncation"] not in ("auto", "disabled"):
        raise InvalidArgument(
            "BAD_VALUE", "truncation is neither auto nor disabled.", "Choose one of them.", param="truncation"
        )
    for included in values["include"]:
        if included not in _INCLUDABLE:
            raise InvalidArgument(
                "BAD_VALUE",
                f"include has {included[:64]!r}, which no response can include.",
                f"Choose from {', '.join(_INCLUDABLE)}.",
                param="include",
            )
    if values["background"] and values["stream"]:
        raise Unsupported(
            "PARAMETER_UNSUPPORTED",
            "A response in the background cannot be streamed by this version of Quire.",
            "Leave stream out and ask for the response by its id.",
            param="stream",
        )
    messages_json = json_text("input", _messages(required(values, "input")))
    instructions = [{"role": "system", "content": values["instructions"]}] if values["instructions"] else []
    instructions_json = json_text("instructions", instructions)
    return AskedResponse(
        request=_request(values, joined_lists(instructions_json, messages_json), limits),
        instructions_json=instructions_json,
        messages_json=messages_json,
        previous=values["previous_response_id"],
        background=values["background"],
        store=values["store"] is not False,
        echoed=tuple((name, json_text(name, value)) for name, value in echoed_fields(values).items()),
    )


def _request(values: Mapping[str, Any], messages_json: str, limits: Limits) -> ParsedRequest:
    """Make the job of a response from checked values and its messages. `reasoning.effort` goes to the chat template;
    the truncation `auto` shortens a prompt that is too long. `max_output_tokens` may be more than the context has room
    for. Logprobs are computed if `include` names them, and `top_logprobs` counts only then. Raises the
    InvalidArgument and Unsupported of `_tools`, `tools_of`, `of_output_format` and `job_request`."""
    kwargs = dict(values["chat_template_kwargs"] or {})
    effort = (values["reasoning"] or {}).get("effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    called = {name: values[name] for name in ("tools", "tool_choice", "parallel_tool_calls")}
    called["tools"] = _tools(values["tools"])
    prompt = ChatPrompt(
        messages_json=messages_json,
        tools_json=tools_of(called, _TOOLS),
        template_kwargs_json=json_text("chat_template_kwargs", kwargs) if kwargs else "",
    )
    with_logprobs = LOGPROBS in values["include"]
    shared = {name: value for name, value in values.items() if name in SAMPLING}
    truncates = {"truncate_prompt_tokens": -1 if values["truncation"] == "auto" else None}
    return job_request(
        {
            **check_fields({}, SAMPLING, limits.sampling_defaults({})),
            **shared,
            **truncates,
            "parallel_tool_calls": values["parallel_tool_calls"],
        },
        limits,
        prompts=(prompt,),
        logprobs=(values["top_logprobs"] or 0) if with_logprobs else -1,
        logprobs_param="top_logprobs",
        max_tokens=None,
        default_max_tokens=values["max_output_tokens"] or limits.max_tokens,
        timings=False,
        parsing=parsing_of(prompt.tools_json),
        calls=demanded_calls(called, prompt.tools_json),
        form=of_output_format((values["text"] or {}).get("format"), "text.format"),
    )


def _tools(tools: list[Any] | None) -> list[Any]:
    """Return a response's tools in the form of a chat. Raises InvalidArgument for a tool that is no object, and
    Unsupported for a tool that is not a function."""
    found = []
    for i, tool in enumerate(tools or []):
        if not isinstance(tool, dict):
            raise bad_type(f"tools[{i}]", tool, "an object")
        if tool.get("type") != "function":
            raise unsupported(f"tools[{i}]", ", a tool that is not a function,")
        found.append({"type": "function", "function": {name: tool[name] for name in _FUNCTION if name in tool}})
    return found


def _messages(given: Any) -> list[dict[str, Any]]:
    """Convert the input, a string or a list of items, to messages. Two adjacent assistant messages become one if either
    has no text, so that reasoning and calls join their message. Raises InvalidArgument for another type, an empty list
    or a malformed item, and Unsupported for items and parts of another type."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_type("input", given, "a string or a list of items")
    if not given:
        raise InvalidArgument("MISSING_FIELD", "input is an empty list.", "Send an item.", param="input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        message, last = _message(item, f"input[{i}]"), messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and (_bare(message) or _bare(last)):
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            content = last["content"] + message["content"]
            thoughts = [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]
            messages[-1] = last | message | {"content": content} | ({"tool_calls": calls} if calls else {})
            if thoughts:
                messages[-1]["reasoning_content"] = "\n".join(thoughts)
        else:
            messages.append(message)
    return messages


def _bare(message: Mapping[str, Any]) -> bool:
    """Whether a message has only calls or reasoning, and no text."""
    return not message["content"]


def _message(item: Any, name: str) -> dict[str, Any]:
    """Convert one item of the input (a message, a function call, a call's output or reasoning) to a message. The role
    `developer` becomes `system`. Raises InvalidArgument for a malformed item or another role, and Unsupported for items
    of another type and parts other than text."""
    if not isinstance(item, dict):
        raise bad_type(name, item, "an object")
    kind = item.get("type", "message")
    if kind == "function_call":
        for member in ("call_id", "name", "arguments"):
            string_member(item, member, name)
        return {"role": "assistant", "content": "", "tool_calls": [tool_call(item)]}
    if kind == "function_call_output":
        call_id = string_member(item, "call_id", name)
        return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), f"{name}.output")}
    if kind == "reasoning":
        parts = item.get("content") or []
        return {"role": "assistant", "content": "", "reasoning_content": _content(parts, f"{name}.content")}
    if kind != "message":
        raise unsupported(name, ", an item of a type that this version does not know,")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(
            "BAD_ROLE", f"{name}.role is not one of {', '.join(_ROLES)}.", "Choose one of them.", param=f"{name}.role"
        )
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{name}.content")}


def _content(content: Any, name: str) -> str:
    """Return the text of an item: a string, or a list of text parts, which are joined. Raises InvalidArgument for
    another type or a malformed part, and Unsupported for parts other than text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_type(name, content, "a string or a list of parts")
    return "".join(_text(part, f"{name}[{i}]") for i, part in enumerate(content))


def _text(part: Any, name: str) -> str:
    """Return the text of one part of an item. Raises InvalidArgument for a part that is no object or whose text is no
    string, and Unsupported for parts other than text."""
    if not isinstance(part, dict):
        raise bad_type(name, part, "an object")
    if part.get("type") not in _TEXT_PARTS:
        raise unsupported(name, ", a part of a type other than text,")
    if not isinstance(part.get("text"), str):
        raise bad_type(f"{name}.text", part.get("text"), "a string")
    return str(part["text"])
