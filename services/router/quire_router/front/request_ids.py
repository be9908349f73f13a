"""Request ids: the client's own, or random ones."""

from __future__ import annotations

import uuid

_MAX_ID = 128


def request_id_from(given: str) -> str:
    """Return the request id that a client gave, if it has at most 128 characters, all of them printable ASCII; else
    ''."""
    return given if given and len(given) <= _MAX_ID and given.isascii() and given.isprintable() else ""


def new_request_id() -> str:
    """Return a random id."""
    return uuid.uuid4().hex
