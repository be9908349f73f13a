"""JSON of large answers, written in pieces: a writer runs in one piece, and no other thread meanwhile."""

from __future__ import annotations

from typing import Any

import orjson

_PIECE_ITEMS = 1024


def dumps_in_pieces(value: Any) -> bytes:
    """The same bytes as orjson.dumps."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> list[bytes]:
    if isinstance(value, dict):
        found = [b"{"]
        for name, member in value.items():
            found += [b"" if len(found) == 1 else b",", orjson.dumps(name), b":", *_pieces(member)]
        return [*found, b"}"]
    if not isinstance(value, list) or not value:
        return [orjson.dumps(value)]
    if isinstance(value[0], dict) and len(value) < _PIECE_ITEMS:  # choices, which hold the long lists
        found = [b"["]
        for item in value:
            found += [b"" if len(found) == 1 else b",", *_pieces(item)]
        return [*found, b"]"]
    parts = (orjson.dumps(value[at : at + _PIECE_ITEMS])[1:-1] for at in range(0, len(value), _PIECE_ITEMS))
    return [b"[", b",".join(parts), b"]"]
