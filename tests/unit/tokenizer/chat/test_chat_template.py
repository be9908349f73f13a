"""Against transformers, where it is installed: it is what template authors write for."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from quire_tokenizer.chat.chat_template import ChatTemplate, OutputTooLarge, TemplateRefused

PLENTY = 1 << 20
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is 2 < 3 & 'x'? 你好 "},
    {
        "role": "assistant",
        "content": "<think>hm</think>\nyes",
        "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1, None, "</s>"]}}}],
    },
    {"role": "tool", "content": "42", "name": "f"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "instructions": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' }}{% if loop.first and system %}{{ '<<SYS>>' ~ system | trim ~ '<</SYS>> ' }}{% endif %}
        {{- message.content | trim + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content.split('</think>')[-1].lstrip('\n') + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "tools": """{%- set ns = namespace(calls=0) -%}
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}
{% for m in messages if m.tool_calls is defined %}
{% for c in m.tool_calls %}{% set ns.calls = ns.calls + 1 %}
<tool_call>{{ c.function.arguments | tojson }}</tool_call>
{{ c.function.arguments | tojson(ensure_ascii=True, sort_keys=True) }}
{% endfor %}{% endfor %}calls: {{ ns.calls }}
""",
    "controls": """{% for m in messages %}
  {% if m.role == 'tool' %}{% break %}{% endif %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ m.content }}{% endgeneration %}

{% endfor %}""",
    "macros": "{% macro show(m, mark='-') %}{{ mark }}{{ m.content|upper }}{% endmacro %}"
    "{% for m in messages %}{{ show(m, mark=loop.index) }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ messages | length }}",
    "undefined": "{{ messages[0].nothing }}{% if documents %}documents{% endif %}{{ messages[0].content[:3] }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    expected = reference.render_jinja_template(
        [MESSAGES],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )[0][0]
    variables = {"messages": MESSAGES, "tools": TOOLS, "documents": None, **VARIABLES}
    assert ChatTemplate(TEMPLATES[name]).render(variables, PLENTY) == expected
    assert expected


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
