"""Checks OpenAI's `messages`, `tools` and template arguments, and converts them to the form that chat templates read.

Content parts other than text are refused by name. Roles come from a fixed list, because a template may make special
tokens of them. This module knows nothing of the sources of templates, or of tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quire_common.errors import InvalidArgument, Unsupported
from quire_common.json_bounds import MAX_STRUCTURE, check_structure
from quire_tokenizer.chat.provenance import strings_of
from quire_tokenizer.chat.stand_ins import CONTINUATION_MARK
from quire_tokenizer.encoder import invalid_unicode
from quire_tokenizer.model_folder import TOKEN_VARIABLES

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Levels of lists and objects in messages, tools and arguments.
MAX_DEPTH = 100
# What the service itself hands to templates.
RESERVED = frozenset(TOKEN_VARIABLES) | {
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "raise_exception", "strftime_now"),
}


@dataclass(frozen=True)
class Conversation:
    """What a user gave to be rendered; all of it is data, none of it is trusted."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    continued: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The template's variables that come from the user."""
        return {"messages": self.messages, "tools": self.tools, **self.kwargs}

    def marked_for_continuation(self) -> Conversation:
        """Return a copy whose last message's text, or last part's text, ends with CONTINUATION_MARK and a space, and
        which is `continued`. A template that trims messages removes the space. Raises InvalidArgument if the message
        has no text."""
        *before, last = self.messages
        mark, content = CONTINUATION_MARK + " ", last.get("content")
        if isinstance(content, list) and content:
            content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + mark}]
        elif isinstance(content, str):
            content = content + mark
        else:
            raise InvalidArgument(
                "NOTHING_TO_CONTINUE",
                "continue_final_message needs a last message with text.",
                "Give the last message content, or leave continue_final_message out.",
                param="messages",
            )
        return Conversation([*before, last | {"content": content}], self.tools, self.kwargs, continued=True)


def parse_conversation(messages_json: str, tools_json: str, kwargs_json: str) -> Conversation:
    """Parse and check the messages, the tools and the template's arguments, all of them JSON; empty text means no tools
    or no arguments. Raises InvalidArgument for invalid JSON, no messages, a malformed message, a tool that is no
    object, a reserved argument, too many values, too deep nesting, lone surrogates, or a text with CONTINUATION_MARK.
    Raises Unsupported for a content part that is not text. An empty list of tools becomes None."""
    messages = load_json(messages_json, "messages", list)
    tools = load_json(tools_json, "tools", list) if tools_json else None
    kwargs = load_json(kwargs_json, "chat_template_kwargs", dict) if kwargs_json else {}
    if not messages:
        raise _bad("NO_MESSAGES", "The conversation has no messages.", "Send at least one.")
    for key in sorted(RESERVED & kwargs.keys()):
        raise _bad(
            "RESERVED_TEMPLATE_ARGUMENT", f"{key} is not a template argument.", "Use the field of that name.", key
        )
    for index, tool in enumerate(tools or []):
        if not isinstance(tool, dict):
            raise _bad("BAD_TOOL", f"tools[{index}] is not an object.", 'Send {"type": "function", ...}.', "tools")
    conversation = Conversation([_message(m, f"messages[{i}]") for i, m in enumerate(messages)], tools or None, kwargs)
    # The arguments count as deep as the lists beside them: all are values of one object of variables.
    for param, value, most in (
        ("messages", conversation.messages, MAX_DEPTH - 1),
        ("tools", conversation.tools, MAX_DEPTH - 1),
        ("chat_template_kwargs", kwargs, MAX_DEPTH),
    ):
        _check_depth(value, most, param)
    try:
        for text in strings_of(conversation.values):
            text.encode()
    except UnicodeEncodeError as error:
        raise invalid_unicode() from error
    if any(CONTINUATION_MARK in text for text in strings_of(conversation.values)):
        raise _bad("RESERVED_CHARACTER", "The conversation holds U+1D9FF, which is reserved.", "Remove it.")
    return conversation


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def load_json(text: str, param: str, kind: type) -> Any:
    """Parse JSON whose value must be of this kind, `list` or `dict`. Raises InvalidArgument, which names `param`, for
    invalid JSON (NaN included), another kind, too many values, or nesting too deep for Python's parser; MAX_DEPTH is
    not checked here."""
    if len(text) > MAX_STRUCTURE:
        check_structure(text.encode(errors="surrogatepass"), param)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep(param) from error
    except ValueError as error:
        raise _bad("INVALID_JSON", f"{param} is not valid JSON.", "Send JSON.", param) from error
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise _bad("INVALID_JSON", f"{param} is not {expected}.", f"Send {expected}.", param)
    return value


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a checked copy of a message, with parsed arguments of its tool calls; `where` names the message in errors.
    Raises InvalidArgument for a role outside ROLES, malformed calls, and content that is neither a string nor a list of
    text parts. Only an assistant's message with `tool_calls`, or with the old `function_call`, which is not checked,
    may leave content out. Raises Unsupported for a part that is not text."""
    if not isinstance(message, dict):
        raise _bad("BAD_MESSAGE", f"{where} is not an object.", 'Send {"role": ..., "content": ...}.')
    role = message.get("role")
    if role not in ROLES:
        raise _bad("BAD_ROLE", f"{where} has the role {str(role)[:50]!r}.", f"Use one of {', '.join(ROLES)}.")
    result = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        result["content"] = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("function_call")):
            raise _bad(
                "NO_CONTENT",
                f"{where} has no content.",
                "Send content; only an assistant's message with tool calls may leave it out.",
            )
    elif not isinstance(content, str):
        raise _bad("BAD_CONTENT", f"{where}.content is neither text nor a list of parts.", "Send a string.")
    if message.get("tool_calls") is not None:
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return the type and the text of a content part, without other fields. Raises Unsupported for a part that is not
    text, and InvalidArgument for a malformed part; `where` names the part in errors."""
    if not isinstance(part, dict):
        raise _bad("BAD_CONTENT", f"{where} is not an object.", 'Send {"type": "text", "text": ...}.')
    kind = part.get("type")
    if kind != "text":
        raise Unsupported(
            "UNSUPPORTED_CONTENT_PART",
            f"{where} has the type {str(kind)[:50]!r}; only 'text' is supported.",
            "Send text parts only.",
            param="messages",
        )
    if not isinstance(part.get("text"), str):
        raise _bad("BAD_CONTENT", f"{where}.text is not a string.", "Send a string.")
    return {"type": "text", "text": part["text"]}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return copies of the tool calls with their arguments parsed: OpenAI writes these as JSON in a string, templates
    expect the object. Missing or blank arguments become an empty object. Arguments that are not a string stay as they
    are. Raises InvalidArgument for malformed calls, or a string that is no JSON object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _bad("BAD_TOOL_CALLS", f"{where} is not a list of objects.", "Send OpenAI's tool_calls.")
    results = []
    for index, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad("BAD_TOOL_CALLS", f"{where}[{index}].function has no name.", "Name the function called.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = load_json(arguments, f"{where}[{index}].function.arguments", dict) if arguments.strip() else {}
        results.append(call | {"function": function | {"arguments": arguments if arguments is not None else {}}})
    return results


def _check_depth(value: Any, left: int, param: str) -> None:
    """Raise InvalidArgument, which names `param`, if any value lies within `left` or more lists and objects. With 0,
    every value does; with 1, the values in a list or an object do."""
    if not left:
        raise _too_deep(param)
    if isinstance(value, list):
        for item in value:
            _check_depth(item, left - 1, param)
    elif isinstance(value, dict):
        for item in value.values():
            _check_depth(item, left - 1, param)


def _bad(code: str, message: str, fix: str, param: str = "messages") -> InvalidArgument:
    return InvalidArgument(code, message, fix, param=param)


def _too_deep(param: str) -> InvalidArgument:
    return _bad("JSON_TOO_DEEP", f"{param} is nested too deeply.", "Flatten it.", param)
