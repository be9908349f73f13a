"""Changes of a JSON text that leave it JSON: values, kinds, members, depth."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.fuzz.changes.byte_changes import changed_bytes

_TEXTS = (
    "",
    " ",
    "a",
    "\x00",
    "é",
    "😀",
    "\u202e",
    "\ufeff",
    "\udc80",
    "x" * 300,
    "0",
    "true",
    "null",
    "../../etc",
    "{{ 7 * 7 }}",
    "<|im_end|>",
    "<s>",
    "-1",
    "1e9",
    "NaN",
    "quire:page:",
    "\r\n",
    "'\"\\",
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    16,
    127,
    255,
    256,
    65_536,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-9,
    1e308,
    -1e308,
    1e-320,
    float("inf"),
    float("-inf"),
    float("nan"),
)
_DEPTHS = (2, 20, 300, 3000)
_MOST_COPIES = 64


def changed_json(data: bytes, choose: random.Random, words: Sequence[str] = ()) -> bytes:
    """Return the text with one to three changes. `words` are names and texts the parser knows. One in twenty changes
    is of bytes, and so is every change of what is no JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, choose)
    if choose.random() < 0.05:
        return changed_bytes(data, choose)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        value = changed_value(value, choose, words)
    try:
        text = json.dumps(value, ensure_ascii=choose.random() < 0.5)
    except RecursionError:
        text = "[" * choose.choice(_DEPTHS)
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates: as escapes they are JSON
        return json.dumps(value).encode()


def changed_value(value: Any, choose: random.Random, words: Sequence[str] = ()) -> Any:
    """Return the value with one change, at a place inside it that is chosen by chance."""
    holder, key = _place(value, choose)
    if holder is None:
        return _other(value, choose, words)
    match choose.randrange(8):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, list):
            holder[key : key + 1] = [holder[key]] * choose.choice((0, 2, 3, _MOST_COPIES))
        case 2 if isinstance(holder, dict):
            holder[choose.choice([*words, *_TEXTS])] = holder[key] if choose.random() < 0.5 else _leaf(choose, words)
        case 3:
            holder[key] = choose.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
        case _:
            holder[key] = _other(holder[key], choose, words)
    return value


def _place(value: Any, choose: random.Random) -> tuple[Any, Any]:
    """Return a container within the value and a key of it; (None, None) where the value has none."""
    found: tuple[Any, Any] = (None, None)
    while isinstance(value, dict | list) and value:
        key = choose.choice(list(value)) if isinstance(value, dict) else choose.randrange(len(value))
        found = value, key
        value = value[key]
        if choose.random() < 0.3:
            break
    return found


def _other(value: Any, choose: random.Random, words: Sequence[str]) -> Any:
    """Return another value: often of the same kind, since another kind is refused at once."""
    kind = choose.random()
    if kind < 0.5 and isinstance(value, bool):
        return not value
    if kind < 0.5 and isinstance(value, int | float):
        return choose.choice((value + 1, value - 1, -value, value * 2, choose.choice(_NUMBERS)))
    if kind < 0.5 and isinstance(value, str):
        return choose.choice(
            (value + choose.choice(_TEXTS), value[: len(value) // 2], choose.choice([*words, *_TEXTS]))
        )
    if kind < 0.55:
        return _nested(choose)
    return _leaf(choose, words)


def _leaf(choose: random.Random, words: Sequence[str]) -> Any:
    return choose.choice((None, True, False, [], {}, choose.choice(_NUMBERS), choose.choice([*words, *_TEXTS])))


def _nested(choose: random.Random) -> Any:
    value: Any = 1
    for _ in range(choose.choice(_DEPTHS[:3])):
        value = [value] if choose.random() < 0.5 else {"a": value}
    return value


def is_json(data: bytes) -> bool:
    """Whether these bytes are JSON, however deep."""
    try:
        json.loads(data)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True
