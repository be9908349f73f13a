"""Bounds on how much longer the steps of a tokenizer make a text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers

from quire_tokenizer.text_growth import LARGEST_GROWTH, largest_growth

BYTE_LEVEL = {"type": "ByteLevel"}


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([], 1),
        ([{"type": "Lowercase"}], 1),
        ([BYTE_LEVEL], 2),
        ([BYTE_LEVEL] * 3, 8),
        ([replace("▁", String=" ")], 3),
        ([replace(" ", String="▁")], 1),
        ([replace("ab", Regex="x*")], 3),
        ([replace("ab", String="")], 3),
        ([{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")], 12),
        ([{"type": "NFC"}, {"type": "NFC"}, BYTE_LEVEL], 6),
        ([{"type": "NFKC"}, {"type": "Metaspace", "replacement": "▁"}], 44),
    ],
)
def test_growth_of_steps(steps: list[dict[str, Any]], growth: float) -> None:
    assert largest_growth(steps) == growth


def test_a_long_list_of_steps_is_above_the_limit_and_no_overflow() -> None:
    assert largest_growth([BYTE_LEVEL] * 100_000) > LARGEST_GROWTH


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normalization_makes_no_character_longer_than_it_says(kind: str) -> None:
    normalizer = getattr(normalizers, kind)()
    growth = largest_growth([{"type": kind}])
    for code in (*range(0xD800), *range(0xE000, 0x110000)):
        character = chr(code)
        assert len(normalizer.normalize_str(character).encode()) <= growth * len(character.encode())
