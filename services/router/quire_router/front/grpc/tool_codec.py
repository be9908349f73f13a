"""Tools of a chat in quire.v1: a request's fields as OpenAI's fields that mean the same, and the parts of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire.v1 import inference_pb2 as ib
from quire_common.errors import InvalidArgument
from quire_common.finish import PartKind
from quire_router.front.call_ids import call_id
from quire_router.front.parameters.tables import MAX_TOOLS, MAX_TOOLS_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_router.sequences.delta import TextPart

_MODES = {
    ib.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    ib.TOOL_CHOICE_MODE_AUTO: "auto",
    ib.TOOL_CHOICE_MODE_NONE: "none",
    ib.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def tool_values(request: ib.GenerateRequest) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls` (true unless set) of a request, in OpenAI's form. Raises
    InvalidArgument for a `tools_json` that `_tools` refuses and a malformed choice; single tools are not checked. Also
    raises it if the prompt is not a chat, but `tool_choice`, `parallel_tool_calls` or `parts` is set."""
    if request.WhichOneof("prompt") != "chat":
        for name in ("tool_choice", "parallel_tool_calls", "parts"):
            if request.HasField(name):
                raise InvalidArgument(
                    "NO_CHAT", f"{name} is set, but the prompt is no chat.", f"Send a chat, or no {name}.", param=name
                )
    return {
        "tools": _tools(request.chat.tools_json),
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": not request.HasField("parallel_tool_calls") or request.parallel_tool_calls,
    }


def add_parts(
    response: ib.GenerateResponse, parts: Iterable[TextPart], request_id: str, choice: int, *, parallel: bool
) -> None:
    """Write the parts of a delta to its response: text, reasoning, and tool calls with their ids, names and arguments.
    Without `parallel`, calls after the first are left out, and their characters are added to `hidden_characters`.
    Consecutive pieces of one call become one entry. `choice` is the choice's sample index, from which the ids of its
    calls are made."""
    text, reasoning = list[str](), list[str]()
    for part in parts:
        if part.kind == PartKind.CONTENT:
            text.append(part.text)
        elif part.kind == PartKind.REASONING:
            reasoning.append(part.text)
        elif part.call > 0 and not parallel:
            response.hidden_characters += len(part.text)
        elif part.kind == PartKind.TOOL_NAME:
            response.tool_calls.add(index=part.call, id=call_id(request_id, choice, part.call), name=part.text)
        elif response.tool_calls and response.tool_calls[-1].index == part.call:
            response.tool_calls[-1].arguments += part.text
        else:
            response.tool_calls.add(index=part.call, arguments=part.text)
    response.text, response.reasoning = "".join(text), "".join(reasoning)


def _tools(tools_json: str) -> list[Any]:
    """Parse OpenAI's list of tools; an empty text is an empty list. The tools themselves are not checked. Raises
    InvalidArgument if the text is too long, is not a JSON list, or has more than MAX_TOOLS tools."""
    if not tools_json:
        return []
    if len(tools_json) > MAX_TOOLS_CHARS:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"tools_json has {len(tools_json)} characters; the limit is {MAX_TOOLS_CHARS}.",
            "Send fewer tools, or shorter schemas.",
            param="tools",
        )
    try:
        tools = orjson.loads(tools_json)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument("BAD_JSON", f"tools_json is no JSON: {error}.", "Send a list.", param="tools") from None
    if not isinstance(tools, list):
        raise InvalidArgument("BAD_TYPE", "tools_json is no list.", "Send OpenAI's list of tools.", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"tools_json has {len(tools)} tools; the limit is {MAX_TOOLS}.",
            f"Send at most {MAX_TOOLS} tools.",
            param="tools",
        )
    return tools


def _choice(choice: ib.ToolChoice) -> Any:
    """Convert the choice to OpenAI's `tool_choice`: `auto` (also if unspecified), `none`, `required`, or an object that
    names a function. Raises InvalidArgument for an unknown mode, and for a name with another mode than `required`."""
    mode = _MODES.get(choice.mode)
    if mode is None:
        raise InvalidArgument(
            "BAD_VALUE",
            f"tool_choice.mode is {choice.mode}.",
            f"Choose from {min(_MODES)} to {max(_MODES)}.",
            param="tool_choice.mode",
        )
    if choice.name and mode != "required":
        raise InvalidArgument(
            "CONTRADICTION",
            f"tool_choice names a tool, and its mode is {mode}.",
            "Set the mode to TOOL_CHOICE_MODE_REQUIRED, or leave the name out.",
            param="tool_choice.name",
        )
    return {"type": "function", "function": {"name": choice.name}} if choice.name else mode
