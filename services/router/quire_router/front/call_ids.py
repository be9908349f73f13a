"""Ids of tool calls, which every API gives to a call."""

from __future__ import annotations

import hashlib

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_CHARS = 9


def call_id(request_id: str, choice: int, call: int) -> str:
    """Return the id of a tool call: nine lowercase letters and digits, as Mistral's chat templates require. The id is a
    hash of the request id and of the indices of choice and call, so a resumed stream has the same ids."""
    digest = hashlib.blake2b(f"{request_id}:{choice}:{call}".encode(), digest_size=_ID_CHARS).digest()
    return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest)
