"""Whether texts match the grammar of a source, as an engine sees it: token by token, by llguidance."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire_tokenizer.grammar.canonical_text import ModelOutputFormat, canonical_text
from quire_tokenizer.grammar.grammar_source import GrammarSource

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo" / "tokenizer.json"


@lru_cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(DEMO.read_text(), eos_token=[4, 1])


@lru_cache
def added() -> dict[str, int]:
    return {each["content"]: each["id"] for each in json.loads(DEMO.read_text())["added_tokens"]}


def output_format(**parsers: str) -> ModelOutputFormat:
    return ModelOutputFormat(added(), **parsers)


def source(kind: str, text: Any = "", **options: Any) -> GrammarSource:
    return GrammarSource(kind, text if isinstance(text, str) else json.dumps(text), **options)


def compiled(of: GrammarSource, model: ModelOutputFormat | None = None) -> tuple[str, list[str]]:
    """Canonical text, which compiles, and warnings."""
    warnings: list[str] = []
    text = canonical_text(of, model or output_format(), warnings)
    matcher = LLMatcher(tokenizer(), text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return text, [*warnings, *matcher.get_grammar_warnings()]


def accepts(text: str, answer: str) -> bool:
    """Whether the answer, markers being tokens, may end where it ends."""
    matcher = LLMatcher(tokenizer(), text, log_level=0)
    ids = tokenizer().tokenize_str(answer, parse_special=True)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
