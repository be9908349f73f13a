"""ThinkingMarks: the tokens that begin and end a model's thinking. Thinking budgets need them.

The marks are those that --reasoning-config (vLLM's option) names, or a known pair among the tokens that were added to
the vocabulary. This module does not count tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError
from quire_common.thinking import MAX_MARK_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_KEYS = ("reasoning_start_str", "reasoning_end_str")


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The token ids that begin the thinking, and those that end it. Both are empty if no marks are known."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


def find_marks(tokenizer: Tokenizer, reasoning_config: str = "") -> ThinkingMarks:
    """Find the tokens between which the model thinks. They are those of `reasoning_config` (JSON with the two strings)
    or, if it is empty, a known pair among the added tokens. Both are empty if there is no such pair. Raises ConfigError
    for a `reasoning_config` that is not JSON of two strings, each of 1 to MAX_MARK_TOKENS tokens."""
    if reasoning_config:
        return _configured(tokenizer, reasoning_config)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    for start, end in _KNOWN:
        if start in added and end in added:
            return ThinkingMarks((added[start],), (added[end],))
    return ThinkingMarks()


def _configured(tokenizer: Tokenizer, text: str) -> ThinkingMarks:
    """Return the token ids of the two strings in --reasoning-config. Raises ConfigError for text that is not JSON of
    just these two, or a value that is not a string of 1 to MAX_MARK_TOKENS tokens."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _bad("is not JSON") from error
    if not isinstance(config, dict) or {*config} != {*_KEYS}:
        raise _bad(f"does not have just {' and '.join(_KEYS)}")
    marks = [_ids(tokenizer, config[key]) for key in _KEYS]
    if not all(1 <= len(mark) <= MAX_MARK_TOKENS for mark in marks):
        raise _bad(f"has a marker that is not a text of 1 to {MAX_MARK_TOKENS} tokens")
    return ThinkingMarks(*marks)


def _ids(tokenizer: Tokenizer, text: object) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids) if isinstance(text, str) else ()


def _bad(what: str) -> ConfigError:
    """Return the ConfigError that says what is wrong with the option."""
    return ConfigError(
        "BAD_REASONING_CONFIG",
        f"--reasoning-config {what}.",
        'Give JSON like {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}.',
        param="reasoning_config",
    )
