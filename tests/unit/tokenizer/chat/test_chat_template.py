"""Chat templates: what they may read and do, and which of them are refused."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from quire_tokenizer.chat.chat_template import ChatTemplate, OutputTooLarge, TemplateRefused

PLENTY = 1 << 20


def one(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_parts_are_joined_for_templates_that_read_strings() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert template.render(one(PARTS), PLENTY) == "[a\nb]"
    assert template.render(one("a"), PLENTY) == "[a]"


def test_strings_become_parts_for_templates_that_read_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    assert template.takes_parts
    assert template.render(one(PARTS), PLENTY) == "[a][b]"
    assert template.render(one("a"), PLENTY) == "[a]"


def test_a_refusal_is_the_templates_own() -> None:
    with pytest.raises(TemplateRefused, match="only users here"):
        ChatTemplate("{{ raise_exception('only users here') }}").render(one("x"), PLENTY)


def test_broken_templates() -> None:
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% for m in messages %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with pytest.raises((SecurityError, OverflowError)):
        ChatTemplate(source).render(one("x"), PLENTY)


def test_output_is_bounded() -> None:
    with pytest.raises(OutputTooLarge):
        ChatTemplate("{% for i in range(1000) %}xxxxxxxxxx{% endfor %}").render(one("x"), 5000)
