"""Converts bodies of Anthropic's /v1/messages and count_tokens to the jobs that all APIs use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument, Unsupported
from quire_router.front.http.parsing.parse import ParsedRequest, job_request
from quire_router.front.http.parsing.prompts import required, string_member, text_of_part
from quire_router.front.http.parsing.structured_fields import of_output_format
from quire_router.front.http.parsing.text_fields import CountRequest
from quire_router.front.parameters.fields import bad_type, check_fields, json_text
from quire_router.front.parameters.tables import COUNT_TOKENS, MESSAGES, OUTPUT_CONFIG, SAMPLING, THINKING
from quire_router.front.parameters.tool_fields import ToolForm, bad_choice, demanded_calls, parsing_of, tools_of
from quire_router.sequences.job import ChatPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits
    from quire_router.sequences.structured import StructuredOutput

_ROLES = ("user", "assistant", "system")
_THINKING_TYPES = ("enabled", "adaptive", "disabled")
_CHOICES = ("auto", "any", "none", "tool")
_TOOLS = ToolForm(
    {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"},
    'Send {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}.',
)


def parse_messages(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> ParsedRequest:
    """Check a body of /v1/messages and convert it to a job. `max_tokens` is required, but unlike in OpenAI's APIs, it
    may be more than the context has room for. `thinking` of the type `enabled` sets the budget of reasoning tokens,
    `adaptive` sets none, and `disabled` hides reasoning. Raises InvalidArgument for missing, unknown or wrong fields of
    the body and of `thinking`, but ignores unknown members of messages, tools and `tool_choice`. Raises Unsupported for
    blocks such as images, tools that a server runs, and fields that Quire lacks. `timings`: the client wants timings in
    the answer."""
    defaults = limits.sampling_defaults(body)
    values = check_fields(body, MESSAGES, defaults)
    prompt, choice = conversation_of(values), values["tool_choice"] or {}
    shared = {**check_fields({}, SAMPLING, defaults), **values, "stop": values["stop_sequences"]}
    thinking, parallel = _thinking(values["thinking"]), _is_parallel(choice)
    if thinking["budget_tokens"] is not None:
        shared["thinking_token_budget"] = thinking["budget_tokens"]
    return job_request(
        shared
        | {
            "include_reasoning": thinking["type"] != "disabled",
            "parallel_tool_calls": parallel,
        },
        limits,
        prompts=(prompt,),
        logprobs=-1,
        logprobs_param="",
        max_tokens=None,
        default_max_tokens=required(values, "max_tokens"),
        timings=timings,
        parsing=parsing_of(prompt.tools_json),
        calls=demanded_calls({**_tool_values(values), "parallel_tool_calls": parallel}, prompt.tools_json),
        form=_output_format(values),
    )


def parse_count(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> CountRequest:
    """Parse a body of /v1/messages/count_tokens. All fields are checked as in `parse_messages`, although `thinking` and
    the format of the answer change nothing. Raises InvalidArgument, Unsupported."""
    values = check_fields(body, COUNT_TOKENS)
    prompt = conversation_of(values)
    _thinking(values["thinking"])
    _is_parallel(values["tool_choice"] or {})
    _output_format(values)
    return CountRequest(values["model"], prompt)


def conversation_of(values: Mapping[str, Any]) -> ChatPrompt:
    """Make the conversation, with its tools, from fields whose types are checked, with `system` first. If the last
    message is the assistant's, the model continues that message, which Anthropic calls prefill. A message with tool
    calls is not continued, because its text ends before its calls. Raises InvalidArgument for an empty or malformed
    list of messages, a malformed `system`, and malformed tools or `tool_choice`; and Unsupported for blocks such as
    images, and for tools that a server runs."""
    messages = required(values, "messages")
    if not messages:
        raise InvalidArgument("MISSING_FIELD", "messages is empty.", "Send a message.", param="messages")
    found = [turn for i, message in enumerate(messages) for turn in _turns(message, f"messages[{i}]")]
    continues = found[-1]["role"] == "assistant" and "tool_calls" not in found[-1]
    if values["system"]:
        found.insert(0, {"role": "system", "content": _text(values["system"], "system")})
    kwargs = values["chat_template_kwargs"]
    return ChatPrompt(
        messages_json=json_text("messages", found),
        tools_json=tools_of(_tool_values(values), _TOOLS),
        template_kwargs_json=json_text("chat_template_kwargs", kwargs) if kwargs else "",
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _turns(message: Any, name: str) -> list[dict[str, Any]]:
    """Check a message, and return it as OpenAI's messages. Each tool result becomes its own message before the user's
    text; without text, only the results remain. An assistant's thinking becomes `reasoning_content`; redacted thinking
    is left out. Raises InvalidArgument for another role and malformed content, and Unsupported for blocks of another
    type, or of a type that the role cannot have. `name` is the message's place in the body, for errors."""
    if not isinstance(message, dict):
        raise bad_type(name, message, "an object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidArgument(
            "BAD_ROLE",
            f"{name}.role is not one of {', '.join(_ROLES)}.",
            "Send user or assistant.",
            param=f"{name}.role",
        )
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"{name}.content")}]
    turn: dict[str, Any] = {"role": role, "content": ""}
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        where = f"{name}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            turn.setdefault("tool_calls", []).append(_tool_use(block, where))
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{where}.content")
            results.append(
                {"role": "tool", "tool_call_id": string_member(block, "tool_use_id", where), "content": text}
            )
        elif kind == "thinking" and role == "assistant":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + string_member(block, "thinking", where)
        elif kind != "redacted_thinking" or role != "assistant":
            turn["content"] += text_of_part(block, where, "block")
    if results and not turn["content"]:
        return results
    return [*results, turn]


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call of an earlier answer in OpenAI's form, with its input as JSON text. Raises InvalidArgument
    unless the input is an object, and id and name are strings. `where` is the block's place in the body, for errors."""
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_type(f"{where}.input", arguments, "an object")
    function = {"name": string_member(block, "name", where), "arguments": json_text(f"{where}.input", arguments)}
    return {"id": string_member(block, "id", where), "type": "function", "function": function}


def _tools(tools: list[Any] | None) -> list[Any]:
    """Return Anthropic's tools in OpenAI's form; members of a tool are not checked. Raises InvalidArgument for a tool
    that is no object, and Unsupported for a `type` other than `custom`, since a server runs such tools."""
    found = []
    for i, tool in enumerate(tools or []):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise bad_type(where, tool, "an object")
        if tool.get("type") not in (None, "custom"):
            shown = json_text(f"{where}.type", tool["type"])[:50]
            raise Unsupported(
                "UNSUPPORTED_FIELD",
                f"{where}.type is {shown}, but this server does not run tools itself.",
                "Send tools with a name and an input_schema.",
                param=f"{where}.type",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function = {name: value for name, value in function.items() if value is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `tools` and `tool_choice` of a body in OpenAI's form. Raises the errors of `_tools`
    and `_choice`."""
    return {"tools": _tools(values["tools"]), "tool_choice": _choice(values["tool_choice"])}


def _choice(choice: Mapping[str, Any] | None) -> Any:
    """Return OpenAI's value for Anthropic's tool_choice: `required` for `any`, a function for a single tool, other
    types unchanged; `auto` without a choice or a type. Raises InvalidArgument for another type, and for the type `tool`
    without a name."""
    choice = choice or {}
    kind, name = choice.get("type", "auto"), choice.get("name")
    if kind not in _CHOICES or (kind == "tool" and not (isinstance(name, str) and name)):
        raise bad_choice(choice, _TOOLS)
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}
    return "required" if kind == "any" else kind


def _output_format(values: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the structure that `output_config.format`, or its older name `output_format`, asks for; None if neither is
    set. Raises InvalidArgument if both are set or `output_config` has unknown or wrong members, and the errors of
    `of_output_format` for the one that is set."""
    config = check_fields(values["output_config"] or {}, OUTPUT_CONFIG)
    if config["format"] is not None and values["output_format"] is not None:
        raise InvalidArgument(
            "CONTRADICTION",
            "output_config.format and output_format say what the answer must match.",
            "Send one of them.",
            param="output_format",
        )
    if config["format"] is not None:
        return of_output_format(config["format"], "output_config.format")
    return of_output_format(values["output_format"], "output_format")


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the type and the budget of reasoning tokens, both None without `thinking`; only the type `enabled` has a
    budget. Raises InvalidArgument for an unknown type, an unknown or wrong member, and a missing or needless budget."""
    values = check_fields(thinking or {}, THINKING)
    kind, budget = values["type"], values["budget_tokens"]
    if thinking is not None and kind not in _THINKING_TYPES:
        raise InvalidArgument(
            "BAD_VALUE" if kind else "MISSING_FIELD",
            f"thinking.type is {'unknown' if kind else 'missing'}.",
            f"Send one of {', '.join(_THINKING_TYPES)}, or leave thinking out.",
            param="thinking.type",
        )
    if (kind == "enabled") != (budget is not None):
        raise InvalidArgument(
            "CONTRADICTION" if budget else "MISSING_FIELD",
            f"thinking.budget_tokens is {'only for' if budget else 'missing for'} the type enabled.",
            "Send an integer above 0 with the type enabled, or leave budget_tokens out with another type.",
            param="thinking.budget_tokens",
        )
    return values


def _is_parallel(choice: Mapping[str, Any]) -> bool:
    """Return whether the answer may have several tool calls. Raises InvalidArgument unless `disable_parallel_tool_use`
    is a boolean, null or absent."""
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise bad_type("tool_choice.disable_parallel_tool_use", single, "a boolean")
    return not single


def _text(content: Any, name: str) -> str:
    """Return the text of a message's content, a string or a list of text blocks. Blocks are joined without anything
    between them. Raises InvalidArgument for other content or a malformed block, and Unsupported for a block that is not
    text. `name` is the content's place in the body, for errors."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_type(name, content, "a string or a list of blocks")
    return "".join(text_of_part(block, f"{name}[{i}]", "block") for i, block in enumerate(content))
