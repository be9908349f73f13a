"""Parsed requests as they cross from the child process to the router, and whether two of them are equal."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from quire_router.front.http.bodies.parsed_codec import decode_parsed, encode_parsed


def crossed(parsed: Any) -> Any:
    """What the router makes of a parsed request that the child process sends."""
    message, payload = encode_parsed(parsed)
    return decode_parsed(json.loads(json.dumps(message)), payload)


def same(left: Any, right: Any) -> bool:
    """Whether two parsed requests are equal, types included. Arrays cannot be compared by `==`."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left) if f.compare)
    return bool(left == right)
