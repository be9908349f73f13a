"""The marks of a model's thinking: found among its added tokens, or as the configuration says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from quire_common.errors import ConfigError
from quire_tokenizer.chat.thinking_marks import ThinkingMarks, find_marks
from tests.unit.tokenizer.folders import byte_level, metaspace


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def test_known_marks_are_found() -> None:
    tokenizer = byte_level()
    assert find_marks(tokenizer) == ThinkingMarks(ids(tokenizer, "<think>"), ids(tokenizer, "</think>"))
    other = metaspace()
    assert find_marks(other) == ThinkingMarks()
    other.add_tokens([AddedToken("[THINK]", special=True)])
    assert find_marks(other) == ThinkingMarks(), "one mark alone is none"
    other.add_tokens([AddedToken("[/THINK]", special=True)])
    assert find_marks(other).end == (other.token_to_id("[/THINK]"),)


def test_marks_are_configured_by_what_the_model_writes() -> None:
    tokenizer = byte_level()
    config = {"reasoning_start_str": "<tag>", "reasoning_end_str": "</think>\n\n"}
    found = find_marks(tokenizer, json.dumps(config))
    assert found == ThinkingMarks(ids(tokenizer, "<tag>"), ids(tokenizer, "</think>\n\n"))
    assert len(found.start) > 1 and found.end[0] == tokenizer.token_to_id("</think>")


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"reasoning_start_str": "<think>"}',
        '{"reasoning_start_str": "<think>", "reasoning_end_str": "x", "more": 1}',
        '{"reasoning_start_str": "", "reasoning_end_str": "x"}',
        '{"reasoning_start_str": 3, "reasoning_end_str": "x"}',
        json.dumps({"reasoning_start_str": "a", "reasoning_end_str": "b c" * 40}),
    ],
)
def test_a_bad_configuration_ends_the_start(config: str) -> None:
    with pytest.raises(ConfigError, match="--reasoning-config"):
        find_marks(byte_level(), config)


def test_the_demo_model_thinks() -> None:
    demo = Tokenizer.from_file(str(Path(__file__).resolve().parents[4] / "models" / "demo" / "tokenizer.json"))
    assert find_marks(demo) == ThinkingMarks((11,), (12,))
