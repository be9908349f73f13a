"""Writes large answers as JSON in pieces, because orjson holds the GIL while it writes, and no other thread can run.
Objects that exist for each token (a dict for each of its alternatives) are converted to text at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

_PIECE_ITEMS = 1024


def dumps_in_pieces(value: Any) -> bytes:
    """Return the same bytes as orjson.dumps, written in pieces, between which other threads run. The names in objects
    must be strings. A numpy array is written like a list; it must be the value itself or a member of it."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> list[bytes | memoryview]:
    """Return the JSON of a value as consecutive parts. Objects, and lists of fewer than 1,024 items whose first item is
    an object, are written member by member. Other lists and arrays are written 1,024 items at a time, and any other
    value is one part."""
    if isinstance(value, dict):
        found: list[bytes | memoryview] = [b"{"]
        for name, member in value.items():
            found += [b"" if len(found) == 1 else b",", orjson.dumps(name), b":", *_pieces(member)]
        return [*found, b"}"]
    if isinstance(value, np.ndarray):
        pieces = (value[at : at + _PIECE_ITEMS].tolist() for at in range(0, len(value), _PIECE_ITEMS))
        return [b"[", b",".join(orjson.dumps(piece)[1:-1] for piece in pieces), b"]"]
    if not isinstance(value, list) or not value:
        return [orjson.dumps(value)]
    found = [b"["]
    if isinstance(value[0], dict) and len(value) < _PIECE_ITEMS:  # choices, which hold the long lists
        for item in value:
            found += [b"" if len(found) == 1 else b",", *_pieces(item)]
        return [*found, b"]"]
    for at in range(0, len(value), _PIECE_ITEMS):
        piece = orjson.dumps(value[at : at + _PIECE_ITEMS])
        found += [b"" if at == 0 else b",", memoryview(piece)[1:-1]]  # not copied once more
    return [*found, b"]"]


def written(value: Any) -> orjson.Fragment:
    """Serialize a value now, and return a fragment that orjson.dumps copies. The text needs a tenth of the value's
    memory."""
    return orjson.Fragment(orjson.dumps(value))
