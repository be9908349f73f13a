"""Checks `tools` and `tool_choice` of a chat, in the form of OpenAI's chat completions, and returns the structure that
they demand of the answer. Errors name the fields as the client's API does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_common.sequence import unsupported
from quire_router.front.parameters.fields import MAX_NAME_CHARS, bad_type, json_text
from quire_router.sequences.job import Parsing
from quire_router.sequences.structured import RequiredTools

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODES = ("none", "auto", "required")
_TYPES: tuple[tuple[str, type, str], ...] = (
    ("parameters", dict, "an object"),
    ("description", str, "a string"),
    ("strict", bool, "a boolean"),
)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How an API writes tools and tool_choice, for errors."""

    members: Mapping[str, str]
    """Where a tool of this API has the members that chat completions have in `function`."""
    choices: str
    """The values of tool_choice, as the fix of an error."""


CHAT_TOOLS = ToolForm(
    {member: f"function.{member}" for member in ("name", *(member for member, _, _ in _TYPES))},
    'Send auto, none, required, or {"type": "function", "function": {"name": ...}}.',
)


def tools_of(values: Mapping[str, Any], form: ToolForm = CHAT_TOOLS) -> str:
    """Check the tools and tool_choice, and return the tools as JSON, for the chat template and the parser. Returns ''
    if there are none or tool_choice is `none`. Raises InvalidArgument for malformed or duplicate tools, and for a
    choice that no tool fits. Raises Unsupported for choices among some of the tools. `form`: the form of the client's
    tools, from which `values` were converted."""
    tools = values["tools"] or []
    names = [_check_tool(tool, f"tools[{at}]", form) for at, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument("DUPLICATE_TOOL", f"Two tools have the name {twice}.", "Rename one.", param="tools")
    mode, name = _choice(values.get("tool_choice"), form)
    if mode == "required" and not names:
        raise InvalidArgument(
            "CONTRADICTION",
            "tool_choice demands a call, and there are no tools.",
            "Send tools, or leave tool_choice out.",
            param="tool_choice",
        )
    if name and name not in names:
        raise InvalidArgument(
            "UNKNOWN_TOOL",
            f"tool_choice names {name[:MAX_NAME_CHARS]!r}, which is none of the tools.",
            f"Name one of: {', '.join(names)}.",
            param="tool_choice",
        )
    return json_text("tools", tools) if tools and mode != "none" else ""


def demanded_calls(values: Mapping[str, Any], tools_json: str) -> RequiredTools | None:
    """Return the structure that the tools demand of the answer: a call that tool_choice requires, or arguments that
    follow the schemas of strict tools. None if there is none. Several calls are allowed unless tool_choice names a tool
    or `parallel_tool_calls` is false. `tools_json` is the result of `tools_of` for these values."""
    if not tools_json:
        return None
    mode, name = _choice(values.get("tool_choice"), CHAT_TOOLS)
    strict = any(tool["function"].get("strict") for tool in values["tools"])
    if mode != "required" and not strict:
        return None
    return RequiredTools(
        tools_json,
        required=mode == "required",
        name=name,
        parallel=not name and values.get("parallel_tool_calls", True),
        param="tool_choice" if mode == "required" else "tools",
    )


def parsing_of(tools_json: str) -> Parsing:
    """Return the parts that the tokenizer looks for in a chat's answer: reasoning always, and calls if there are
    tools."""
    return Parsing(tool_calls=bool(tools_json), reasoning=True, tools_json=tools_json)


def bad_choice(choice: Any, form: ToolForm) -> InvalidArgument:
    """Make the error for a tool_choice that the client's API does not have. `choice` is as the client sent it."""
    shown = json_text("tool_choice", choice)[:50]
    return InvalidArgument("BAD_TOOL_CHOICE", f"tool_choice is {shown}.", form.choices, param="tool_choice")


def _check_tool(tool: Any, name: str, form: ToolForm) -> str:
    """Check the type, name, parameters, description and strictness of one tool, and return the name of its function.
    Raises InvalidArgument if one of them is malformed; `name` is the tool's place in the body."""
    if not isinstance(tool, dict):
        raise bad_type(name, tool, "an object")
    if tool.get("type") != "function":
        shown = json_text(f"{name}.type", tool.get("type"))[:50]
        raise InvalidArgument("BAD_TOOL", f"{name}.type is {shown}.", 'Send "function".', param=name)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_type(f"{name}.function", function, "an object")
    called = function.get("name")
    if not isinstance(called, str) or not called or len(called) > MAX_NAME_CHARS:
        raise InvalidArgument(
            "BAD_TOOL",
            f"{name}.{form.members['name']} is not a valid name.",
            f"Send a string of 1 to {MAX_NAME_CHARS} characters.",
            param=name,
        )
    for key, kind, wanted in _TYPES:
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise bad_type(f"{name}.{form.members[key]}", value, wanted)
    return called


def _choice(choice: Any, form: ToolForm) -> tuple[str, str]:
    """Return a pair: the mode (none, auto or required), and the single tool that must be called, '' for any. An object
    that names a function has the mode required; no choice is auto. Raises Unsupported for allowed_tools, and
    InvalidArgument for any other choice."""
    if choice is None:
        return "auto", ""
    if isinstance(choice, str) and choice in _MODES:
        return choice, ""
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            raise unsupported("tool_choice", " of the type allowed_tools")
        # The Responses API has the name beside the type.
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") == "function" and isinstance(name, str) and name:
            return "required", name
    raise bad_choice(choice, form)
