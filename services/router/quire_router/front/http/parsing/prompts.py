"""Converts the prompts of a body in all their forms, and checks messages. There is one error per mistake."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.errors import InvalidArgument, Unsupported
from quire_router.front.parameters.fields import MAX_INT32, bad_type
from quire_router.sequences.job import Prompt, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PROMPTS = 1024
_PIECE_IDS = 65_536


def required(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a required field. Raises InvalidArgument if it is missing."""
    if values[name] is None:
        raise InvalidArgument("MISSING_FIELD", f"{name} is missing.", f"Send {name}.", param=name)
    return values[name]


def prompts_of(prompt: Any) -> tuple[Prompt, ...]:
    """Convert a string, a list of strings, token ids, or a list of lists of token ids to prompts. The first item
    decides which form a list has. Raises InvalidArgument for anything else, an empty list, a list that mixes forms, and
    more than MAX_PROMPTS prompts."""
    if prompt is None:
        raise InvalidArgument("MISSING_FIELD", "prompt is missing.", "Send a prompt.", param="prompt")
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if not isinstance(prompt, list):
        raise bad_type("prompt", prompt, "a string, a list of strings, token ids, or lists of token ids")
    if not prompt:
        raise InvalidArgument("EMPTY_PROMPT", "prompt is an empty list.", "Send at least one prompt.", param="prompt")
    if _is_int(prompt[0]):
        return (token_prompt(prompt),)
    if len(prompt) > MAX_PROMPTS:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"prompt has {len(prompt)} items; the limit is {MAX_PROMPTS}.",
            "Send fewer prompts per request.",
            param="prompt",
        )
    if isinstance(prompt[0], str):
        for item in prompt:
            if not isinstance(item, str):
                raise bad_type("prompt[]", item, "a string, as the first is")
        return tuple(TextPrompt(item) for item in prompt)
    return tuple(token_prompt(item) for item in prompt)


def token_prompt(ids: Any, name: str = "prompt[]") -> TokenPrompt:
    """Convert a list of token ids to an int32 prompt. Raises InvalidArgument for another type, and for an item that is
    not an integer from 0 to 2^31 - 1; booleans are no integers. An empty list is accepted. The list is converted in
    slices, since the longest body has two million ids. `name` is the field, for errors."""
    if not isinstance(ids, list):
        raise bad_type(name, ids, "a list of token ids")
    column = np.empty(len(ids), np.int32)
    for at in range(0, len(ids), _PIECE_IDS):
        piece = ids[at : at + _PIECE_IDS]
        try:
            # A third of numpy's time, and it takes integers of 32 bits alone: but for a bool, which becomes 0 or 1.
            struct.pack_into(f"{len(piece)}i", column.data, 4 * at, *piece)
        except struct.error:
            raise _bad_id(piece, name) from None
        packed = column[at : at + _PIECE_IDS]
        least = packed.min()
        if least < 0 or (least <= 1 and not all(_is_int(piece[i]) for i in np.flatnonzero(packed <= 1).tolist())):
            raise _bad_id(piece, name)
    return TokenPrompt(column)


def _bad_id(ids: list[Any], name: str) -> InvalidArgument:
    """Return the error for the first item that is not an integer or, if all are integers, for the first that is out of
    range. `name` is the field, for the error."""
    for item in ids:
        if not _is_int(item):
            return bad_type(name, item, "an integer")
    wrong = next(item for item in ids if not 0 <= item <= MAX_INT32)
    return InvalidArgument(
        "TOKEN_OUT_OF_RANGE",
        f"Token id {wrong} is not a 32-bit integer.",
        "Send ids of the vocabulary.",
        param=name.removesuffix("[]"),
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def messages_of(messages: Any) -> list[dict[str, Any]]:
    """Check the messages of a chat and return them unchanged. The template decides about their order and roles. Raises
    InvalidArgument if there is none, or for one that is malformed, and Unsupported for parts other than text."""
    if not messages:
        raise InvalidArgument("MISSING_FIELD", "messages is missing or empty.", "Send a message.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, Any]:
    """Check a message and return it unchanged. Raises InvalidArgument unless it is an object with a string as its role
    and, as its content, null, a string or a list of parts. Raises Unsupported for parts other than text. `name` is the
    message's place in the body, for errors."""
    if not isinstance(message, dict):
        raise bad_type(name, message, "an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise bad_type(f"{name}.role", role, "a string")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise bad_type(f"{name}.content", content, "a string or a list of parts")
    for i, part in enumerate(content):
        text_of_part(part, f"{name}.content[{i}]")
    return message


def text_of_part(part: Any, name: str, called: str = "part") -> str:
    """Return the text of one part of a message. Raises InvalidArgument for a part that is no object or has no text, and
    Unsupported for a part of another type. `called` is the API's word for a part, for the error. `name` is the part's
    place in the body."""
    if not isinstance(part, dict):
        raise bad_type(name, part, "an object")
    if part.get("type") != "text":
        raise Unsupported(
            "PARAMETER_UNSUPPORTED",
            f"{name} is a {called} of a type other than text, which this version of Quire does not support.",
            f"Send text {called}s only.",
            param=name,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_type(f"{name}.text", text, "a string")
    return text


def string_member(item: Mapping[str, Any], member: str, name: str) -> str:
    """Return the string in the field `member` of an object; `name` is the object's name, for the error. Raises
    InvalidArgument if the field is missing or is no string."""
    value = item.get(member)
    if not isinstance(value, str):
        raise bad_type(f"{name}.{member}", value, "a string")
    return value


def joined_lists(*lists: str) -> str:
    """Return one JSON list with all items of the given JSON lists, which `json_text` has written."""
    return f"[{','.join(each[1:-1] for each in lists if each != '[]')}]"
