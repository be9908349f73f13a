from __future__ import annotations

import random
import re
import time

import pytest

from quire_tokenizer.detokenize import text_matcher
from quire_tokenizer.detokenize.text_matcher import TextMatcher

# As Mistral's and Llama 3's vocabularies have them.
CONTROLS = [f"[control_{i}]" for i in range(700)] + ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(250)] + ["<|eot_id|>", "<|begin_of_text|>"]


@pytest.mark.parametrize("seed", range(200))
def test_it_finds_what_an_alternation_of_the_longest_first_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(text_matcher, "_PIECE_CHARS", rng.choice((1, 2, 3, 7, 50, 1000)))
    alphabet = "ab<|" if seed % 2 else "a.[*\n😀"
    texts = {"".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 12))}
    plain = re.compile("|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))))
    text = "".join(rng.choices(alphabet, k=rng.randint(0, 200)))
    matcher = TextMatcher(texts)
    assert list(matcher.spans(text)) == [match.span() for match in plain.finditer(text)]
    assert matcher.is_in(text) == bool(plain.search(text))


def test_of_no_texts_none_is_found() -> None:
    assert not list(TextMatcher(()).spans("any text"))


@pytest.mark.parametrize("text", ["[", "[control_", "[control_1", "<", "<|", "<|reserved_special_token_", "<|end_"])
@pytest.mark.parametrize("specials", [CONTROLS, RESERVED], ids=["controls", "reserved"])
def test_a_text_of_beginnings_costs_little(specials: list[str], text: str) -> None:
    """With an alternation 4 MiB of "[" take 20 s, in which no other thread runs."""
    matcher, long = TextMatcher(specials), text * ((1 << 20) // len(text))
    began = time.thread_time()
    assert not list(matcher.spans(long))
    assert time.thread_time() - began < 1.0
