"""Encodes a stored response: the response object, and its conversation for `previous_response_id`.

Other releases and programs may use the same Redis. A value in another form counts as not stored.
"""

from __future__ import annotations

from typing import Any

import orjson

_FIELDS = {"id": str, "status": str, "background": bool}


def pack_response(response: dict[str, Any], messages_json: str = "[]") -> bytes:
    """Return the value to store."""
    return orjson.dumps({"response": response, "messages": orjson.Fragment(messages_json)})


def unpack_response(value: bytes) -> dict[str, Any] | None:
    """Return the object `response` and the list `messages` of a stored value. Returns None for bytes that are not JSON,
    lack a required field, have one of another type, or are nested too deeply, because another program may have written
    them."""
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    response, messages = found.get("response"), found.get("messages")
    if not isinstance(response, dict) or not isinstance(messages, list):
        return None
    if not all(isinstance(response.get(name), kind) for name, kind in _FIELDS.items()):
        return None
    if not all(map(_is_message, messages)):
        return None
    try:
        orjson.dumps(found)
    except orjson.JSONEncodeError:  # nested deeper than orjson can write, though not deeper than it can read
        return None
    return {"response": response, "messages": messages}


def _is_message(value: Any) -> bool:
    """Whether the value is an object with a role. The tokenizer checks the content."""
    return isinstance(value, dict) and isinstance(value.get("role"), str)
