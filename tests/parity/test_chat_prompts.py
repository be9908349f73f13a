"""Prompts that templates make of conversations, against transformers: it is what template authors write for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire_tokenizer.chat.chat_renderer import ChatRenderer, ChatRequest
from quire_tokenizer.chat.chat_template import ChatTemplate
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool
from tests.unit.tokenizer.chat.test_chat_renderer import Here

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
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


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
DEMO_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Shall I compare thee | to a <summer's> day? 😀"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]
DEMO_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def test_prompt_of_the_demo_model_equals_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    demo = Vocabulary(read_model_folder(str(DEMO)))
    reference = transformers.AutoTokenizer.from_pretrained(DEMO)
    renderer = ChatRenderer(demo, Here(), WorkPool(1, 8), max_bytes=1 << 20, allow_request_template=False)  # type: ignore[arg-type]  # only render is used
    rendering = await renderer.render(
        ChatRequest(json.dumps(DEMO_MESSAGES), json.dumps(DEMO_TOOLS), add_generation_prompt=True)
    )
    theirs = [dict(message) for message in DEMO_MESSAGES]
    theirs[2]["tool_calls"] = [CALL | {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}]
    expected = reference.apply_chat_template(theirs, tools=DEMO_TOOLS, add_generation_prompt=True, return_dict=False)
    assert demo.guarded.encode_marked(rendering.text, rendering.specials).tolist() == expected
