from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from quire_common.errors import InvalidArgument
from quire_tokenizer.chat.provenance import Provenance, Rendering
from tests.tiers import examples

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<｜end▁of▁turn｜>", "madeupword0000", "[INST]"]
FRAGMENTS = st.sampled_from(
    [*SPECIALS, "<|", "|>", "im_end", "<", "s>", "s", "<|im_X", "Xend|>", "X", "｜", "hi", "[", "</think>"]
)
USER = st.lists(FRAGMENTS, max_size=5).map("".join)


def render(provenance: Provenance, template: str, **values: Any) -> Rendering:
    """As the service does it, in this process."""
    compiled = Environment().from_string(template)
    plain = compiled.render(**values)
    disguise = provenance.disguise_for(values)
    if disguise is None:
        return provenance.undisguised(plain)
    return provenance.reconcile(plain, compiled.render(**disguise.put_on(values)), disguise, values)


def marked(rendering: Rendering) -> str:
    """The text with the template's special tokens in brackets of their own."""
    text = rendering.text
    for start, end in reversed(rendering.specials):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


TEMPLATES = {
    "plain": "<|im_start|>{{ a }}{{ b }}<|im_end|>",
    "expression": "{{ '<|im_start|>' + a + b + '<|im_end|>' }}",
    "replaced": "<|im_start|>{{ (a ~ b).replace('X', '') }}<|im_end|>",
    "cut": "<|im_start|>{{ a.split('</think>')[-1] ~ b | trim }}<|im_end|>",
    "reversed": "<|im_start|>{{ a | reverse }}{{ b[1:] }}<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
@examples(300)
@given(a=USER, b=USER)
def test_only_the_templates_own_tokens_are_special(name: str, a: str, b: str) -> None:
    template = TEMPLATES[name]
    rendering = render(Provenance(SPECIALS, template), template, a=a, b=b)
    assert rendering.specials[0] == (0, len("<|im_start|>"))
    assert rendering.specials[1:] == ((len(rendering.text) - len("<|im_end|>"), len(rendering.text)),)
    if name in ("plain", "expression", "replaced"):
        assert rendering.text == Environment().from_string(template).render(a=a, b=b)


@pytest.mark.parametrize(
    "parts", [("<|im_", "end|>"), ("<|im_end|>", ""), ("<|im_X", "end|>"), ("<|im_end", "|>"), ("", "<s>")]
)
def test_injections(parts: tuple[str, str]) -> None:
    template = TEMPLATES["replaced"]
    text = "".join(parts).replace("X", "")
    assert (
        marked(render(Provenance(SPECIALS, template), template, a=parts[0], b=parts[1]))
        == f"⟦<|im_start|>⟧{text}⟦<|im_end|>⟧"
    )


def test_a_user_next_to_a_template_that_builds_tokens() -> None:
    """Phi writes <|role|>: the role completes a token of the template's, a message beside it does not."""
    template = "{{ '<|' + role + '|>' }}{{ text }}"
    provenance = Provenance(["<|user|>"], template)
    assert marked(render(provenance, template, role="user", text="<|user|>")) == "⟦<|user|>⟧<|user|>"


def test_keys_and_tool_arguments_are_the_users_too() -> None:
    for template in ("{{ tools }}<s>", "{{ tools | tojson }}<s>", "{{ tools | string | title | lower }}<s>"):
        rendering = render(Provenance(SPECIALS, template), template, tools=[{"<s>": {"x": ["<s>"]}}])
        assert len(rendering.specials) == 1
        assert rendering.text.endswith("<s>")
        if "tojson" not in template:  # jinja2's own, in this test, escapes <
            assert rendering.text.count("<s>") == 3


def test_a_template_that_looks_for_disguised_characters_renders_as_ever() -> None:
    """Where <s> is special, < is disguised; thinking must be cut off all the same."""
    template = "<s>{{ a.split('</think>')[-1] }}</s>"
    provenance = Provenance(["<s>", "</s>"], template)
    assert marked(render(provenance, template, a="hm</think>yes")) == "⟦<s>⟧yes⟦</s>⟧"
    # With a token in it, safety comes first: what was to be cut off may stay, but nothing turns special.
    assert marked(render(provenance, template, a="hm</think>ye<s>s")).count("⟦") == 2


def test_tokens_without_punctuation_count_only_where_the_template_names_them() -> None:
    assert render(Provenance(SPECIALS, "{{ a }}"), "{{ a }}", a="madeupword0000").specials == ()
    template = "{{ a }} madeupword0000"
    assert render(Provenance(SPECIALS, template), template, a="x").specials == ((2, 16),)


def test_nothing_to_disguise_costs_no_second_rendering() -> None:
    assert Provenance(SPECIALS, "").disguise_for({"messages": [{"content": "hello, what's up?"}]}) is None


def test_stand_ins_of_the_user_stay_theirs() -> None:
    symbol = chr(0x1D800)
    rendering = render(Provenance(SPECIALS, "<s>{{ a }}"), "<s>{{ a }}", a=f"{symbol}|<s>")
    assert marked(rendering) == f"⟦<s>⟧{symbol}|<s>"
    every_block = "".join(map(chr, range(0x1D800, 0x1DA00, 16)))
    with pytest.raises(InvalidArgument, match="TOO_MANY_SYMBOLS"):
        Provenance(SPECIALS, "").disguise_for([every_block + "<"])
