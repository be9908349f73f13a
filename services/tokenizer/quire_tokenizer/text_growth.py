"""Bounds how much longer the steps of a tokenizer can make a text.

Steps multiply: a byte-level step writes each byte of a text as up to two bytes, so that 40 of them would turn one
letter into a terabyte. Usual tokenizers have a growth below 50.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGEST_GROWTH = 256
# UTF-8 bytes per byte at most, by the Unicode standard's table of normalization's expansion factors.
_NORMALIZATION = {"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11}


def largest_growth(steps: Iterable[dict[str, Any]]) -> float:
    """Return the UTF-8 bytes into which these steps, one after the other, can turn one byte of a text. A step is an
    object of tokenizer.json with its `type`. Normalization counts once: a normalized text stays as it is. Beyond
    LARGEST_GROWTH, further steps are not counted."""
    growth = 1.0
    normalized = 1
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            growth *= 2
        elif kind == "Replace":
            growth *= _replacement_growth(step["pattern"], step["content"])
        elif kind == "Prepend":
            growth *= 1 + len(step["prepend"].encode())
        elif kind == "Metaspace":
            growth *= 1 + len(step["replacement"].encode())
        normalized = max(normalized, _NORMALIZATION.get(kind, 1))
        if growth > LARGEST_GROWTH:
            break
    return growth * normalized


def _replacement_growth(pattern: dict[str, str], content: str) -> float:
    """Return the growth by one Replace step. A regular expression, or an empty text, may match between two bytes."""
    new = len(content.encode())
    old = len(pattern.get("String", "").encode())
    return max(1.0, new / old) if old else 1.0 + new
