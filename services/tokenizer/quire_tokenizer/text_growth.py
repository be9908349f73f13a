"""Bounds how much longer the steps of a tokenizer can make a text.

Steps multiply: a byte-level step writes each byte of a text as up to two bytes (four with add_prefix_space), so that 40
of them would turn one letter into a terabyte or more. The tokenizers that models are published with stay far below
LARGEST_GROWTH.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGEST_GROWTH = 1024
# UTF-8 bytes per byte at most: by the Unicode standard's table of normalization's expansion factors, and for lower case
# by letters such as U+023A. A text that was normalized once stays as it is, until other characters come into it.
_NORMALIZATION = {"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "BertNormalizer": 6, "Lowercase": 1.5}
# The first bytes of a Precompiled step's map are the length of its index; texts follow, each ended by a zero byte.
_INDEX_LENGTH_BYTES = 4


def largest_growth(steps: Iterable[dict[str, Any]]) -> float:
    """Return the most UTF-8 bytes into which these steps, one after the other, can turn one byte of a text. A step is
    an object of tokenizer.json with its `type`. Of normalizations in a row (also Lowercase, BertNormalizer and
    Precompiled), even with steps between them that add nothing (other than Replace), only the greatest growth counts.
    Once the result exceeds LARGEST_GROWTH, further steps may be left out."""
    growth, normalized = 1.0, 1.0
    for step in steps:
        kind = step["type"]
        if kind in _NORMALIZATION or kind == "Precompiled":
            factor = _NORMALIZATION[kind] if kind in _NORMALIZATION else _precompiled_growth(step)
            normalized = max(normalized, factor)
        elif (factor := _step_growth(step)) > 1 or kind == "Replace":
            growth, normalized = growth * normalized * factor, 1.0
        if growth > LARGEST_GROWTH:
            break
    return growth * normalized


def _step_growth(step: dict[str, Any]) -> float:
    """Return the most by which one step that is no normalization can multiply a text's bytes; 1 for steps that only cut
    or remove text, and for unknown ones."""
    match step["type"]:
        case "ByteLevel":
            # Two bytes for each byte, and a space before each piece that other steps have cut.
            return 4.0 if step.get("add_prefix_space", True) else 2.0
        case "Replace":
            return _replacement_growth(step["pattern"].get("String", ""), step["content"])
        case "Prepend":
            return 1.0 + len(step["prepend"].encode())
        case "Metaspace":
            return 1.0 + len(step["replacement"].encode())
        case "BPEDecoder":
            return _replacement_growth(step["suffix"], " ")
        case "CTC":
            return 2.0 * _replacement_growth(step["word_delimiter_token"], " ")
        case "WordPiece":
            return 2.0
    return 1.0


def _replacement_growth(old: str, new: str) -> float:
    """Return the growth if `new` replaces each `old`. A regular expression, for which `old` is empty, or an empty text
    may match before and behind each byte."""
    size = len(new.encode())
    return max(1.0, size / len(old.encode())) if old else 1.0 + 2 * size


def _precompiled_growth(step: dict[str, Any]) -> float:
    """Return the growth by a map of SentencePiece. Its longest text replaces a character of three bytes, as in the maps
    that are published. The growth is at least 1, and 1 for a map that cannot be decoded."""
    try:
        blob = base64.b64decode(step.get("precompiled_charsmap") or "")
    except (binascii.Error, ValueError):
        return 1.0
    index = int.from_bytes(blob[:_INDEX_LENGTH_BYTES], "little")
    longest = max(map(len, blob[_INDEX_LENGTH_BYTES + index :].split(b"\0")))
    return max(1.0, longest / 3)
