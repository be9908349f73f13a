"""The code of a source that llguidance refuses follows from the error, and not from words of the source."""

from __future__ import annotations

from typing import Any

import pytest

from quire_tokenizer.grammar.compile_child import Compiler, _refusal
from quire_tokenizer.grammar.grammar_source import GrammarRefused
from tests.unit.tokenizer.grammar.matching import DEMO, added, source

MODEL = {"tokenizer": DEMO.read_text(), "eos": [4, 1], "added": added(), "tool_parser": "", "reasoning_parser": ""}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(fuel|gas"),
        ("regex", 'a"too many"('),
        ("grammar", "start: fuel"),
        ("grammar", 'start: "too large'),
        ("grammar", "start: /(fuel/"),
        ("json_schema", {"$ref": "#/fuel"}),
        ("json_schema", {"type": "object", "required": ["fuel"], "properties": {"fuel": False}}),
    ],
)
def test_words_of_a_bad_source_do_not_make_it_too_large(kind: str, text: Any) -> None:
    with pytest.raises(GrammarRefused) as caught:
        Compiler(MODEL).compile(source(kind, text, strict=True))
    assert caught.value.code == "BAD_GRAMMAR"


@pytest.mark.parametrize(
    "message",
    [
        "lexer error: too many expressions constructed\n<non-verbose/>",
        'at 1(8): invalid regex "a\\"b" (in regex): DNF too large, fuel exhausted',
    ],
)
def test_a_source_that_is_too_complex_is_too_large(message: str) -> None:
    assert _refusal(message, source("regex", 'a"b')).code == "GRAMMAR_TOO_LARGE"
