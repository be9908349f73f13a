"""Bounds on how much longer the steps of a tokenizer make a text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from quire_tokenizer.text_growth import LARGEST_GROWTH, largest_growth
from tests.tiers import deep_after

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
NORMALIZERS = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.Strip(),
    normalizers.StripAccents(),
    normalizers.Replace(" ", "▁"),
    normalizers.Replace("a", "ab"),
    normalizers.Replace("∫", "⨌"),
    normalizers.Replace("", "x"),
    normalizers.Replace(Regex("x*"), "ab"),
    normalizers.Prepend("▁"),
]
PRE_TOKENIZERS = [
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Whitespace(),
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.Split("a", "isolated"),
]
DECODERS = [
    decoders.ByteLevel(),
    decoders.Metaspace(),
    decoders.WordPiece(),
    decoders.BPEDecoder(suffix=""),
    decoders.BPEDecoder(suffix="</w>"),
    decoders.CTC(pad_token="<pad>", word_delimiter_token="", cleanup=False),
    decoders.CTC(),
    decoders.Replace("a", "aa"),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
TEXTS = st.text(st.sampled_from("ab x∫ \n\u00e9\u0130\ufdfa\u023a中▁"), min_size=1, max_size=6)


def shapes(parts: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(part.__getstate__()) for part in parts]


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def precompiled(*texts: bytes) -> dict[str, Any]:
    blob = (8).to_bytes(4, "little") + b"12345678" + b"\0".join(texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([], 1),
        ([{"type": "Strip"}], 1),
        ([BYTE_LEVEL], 2),
        ([{"type": "ByteLevel"}], 4),
        ([BYTE_LEVEL] * 3, 8),
        ([replace("▁", String=" ")], 3),
        ([replace(" ", String="▁")], 1),
        ([{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")], 12),
        ([{"type": "NFC"}, {"type": "NFC"}, BYTE_LEVEL], 6),
        ([{"type": "NFC"}, BYTE_LEVEL, {"type": "NFC"}], 18),
        ([{"type": "NFKC"}, {"type": "Metaspace", "replacement": "▁"}], 44),
        ([precompiled(b"a", b"b" * 33), {"type": "NFD"}], 11),
        ([{"type": "Precompiled", "precompiled_charsmap": None}], 1),
    ],
)
def test_growth_of_steps(steps: list[dict[str, Any]], growth: float) -> None:
    assert largest_growth(steps) == growth


@pytest.mark.parametrize(
    "step",
    [
        BYTE_LEVEL,
        replace("aa", String="a"),
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "CTC", "word_delimiter_token": ""},
        {"type": "WordPiece"},
        {"type": "Prepend", "prepend": "a"},
    ],
    ids=lambda step: str(step["type"]),
)
def test_a_long_list_of_growing_steps_is_above_the_limit_and_no_overflow(step: dict[str, Any]) -> None:
    assert largest_growth([step] * 100_000) > LARGEST_GROWTH


def test_a_replacement_between_normalizations_renews_their_growth() -> None:
    round_ = [{"type": "NFKC"}, replace("⨌", String="∫")]
    assert largest_growth(round_ * 8) > LARGEST_GROWTH


@given(TEXTS, st.lists(st.sampled_from(NORMALIZERS), max_size=4))
def test_normalizers_make_no_text_longer_than_the_bound(text: str, parts: list[Any]) -> None:
    try:
        grown = normalizers.Sequence(parts).normalize_str(text)
    except BaseException as error:
        assume(type(error).__name__ != "PanicException")  # the library fails at some sequences of steps
        raise
    assert len(grown.encode()) <= largest_growth(shapes(parts)) * len(text.encode())


@given(TEXTS, st.lists(st.sampled_from(PRE_TOKENIZERS), min_size=1, max_size=3))
def test_pre_tokenizers_make_no_text_longer_than_the_bound(text: str, parts: list[Any]) -> None:
    pieces = pre_tokenizers.Sequence(parts).pre_tokenize_str(text)
    assert sum(len(piece.encode()) for piece, _ in pieces) <= largest_growth(shapes(parts)) * len(text.encode())


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(st.sampled_from(DECODERS), min_size=1, max_size=3))
def test_decoders_make_no_text_longer_than_the_bound(tokens: list[str], parts: list[Any]) -> None:
    grown = decoders.Sequence(parts).decode(tokens)
    assert len(grown.encode()) <= largest_growth(shapes(parts)) * len("".join(tokens).encode())


# Characters that normalization changes are in the first three of Unicode's planes.
@pytest.mark.parametrize("planes", deep_after(1, [range(3), range(3, 17)]), ids=str)
@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_normalization_makes_no_character_longer_than_it_says(kind: str, planes: range) -> None:
    normalizer = getattr(normalizers, kind)()
    growth = largest_growth([{"type": kind}])
    for code in range(planes.start << 16, planes.stop << 16):
        if 0xD800 <= code < 0xE000:  # surrogates are no characters
            continue
        character = chr(code)
        assert len(normalizer.normalize_str(character).encode()) <= growth * len(character.encode())
