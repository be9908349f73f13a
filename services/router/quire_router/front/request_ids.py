"""Ids of requests: the client's own, or random ones."""

from __future__ import annotations

import uuid

_MAX_ID = 128


def request_id_from(given: str) -> str:
    """What a client gave as its request's id, if that is short and printable, else ''."""
    return given if given and len(given) <= _MAX_ID and given.isascii() and given.isprintable() else ""


def new_request_id() -> str:
    """A random id."""
    return uuid.uuid4().hex
