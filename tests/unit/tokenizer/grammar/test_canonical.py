"""Canonical grammars: which answers they allow, and which sources have none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.structured.constraint import MAX_GRAMMAR_BYTES
from quire_tokenizer.grammar.grammar_source import MAX_CHOICES, MAX_DEPTH, GrammarRefused
from tests.tiers import examples
from tests.unit.tokenizer.grammar.matching import accepts, compiled, output_format, source

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LEGACY_TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tag(**format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


ANY = {"type": "any_text"}
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
CALL = {
    "type": "tag",
    "begin": "<tool_call>\n",
    "content": {"type": "json_schema", "json_schema": CITY},
    "end": "\n</tool_call>",
}


@pytest.mark.parametrize(
    "kind, text, good, bad",
    [
        ("json_object", "", ['{"a": [1, null]}', "{}"], ["[]", '{"a"', "{} "]),
        ("json_schema", CITY, ['{"city": "Bonn"}', '{"city":"","x":1}', '{\n "city" :"a"}'], ["{}", '{"city": 1}']),
        ("json_schema", True, ["1", '"a"', "[{}]"], ["", "x"]),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"const": 5}}}, ["5"], ["6"]),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["5", "5.5"], ['"5"']),
        ("regex", "[a-c]+/x{2}", ["a/xx", "abc/xx"], ["a/x", "/xx", "d/xx"]),
        ("regex", "line\n[0-9]", ["line\n5"], ["line5"]),
        ("choice", ["a", "ab", 'c"d', "x\x7f\n", "ü/😀"], ["a", "ab", 'c"d', "x\x7f\n", "ü/😀"], ["b", "abc", ""]),
        ("grammar", 'root ::= "a" | num\nnum ::= [0-9]+ "x"', ["a", "12x"], ["12", "ax"]),
        ("grammar", 'start: "a" | num\nnum: /[0-9]+/ "x"', ["a", "12x"], ["12", "ax"]),
        ("structural_tag", LEGACY_TAG, ["free", 'hi <function=f>{"city": "x"}</function>!', "<function=g>1</function>"],
         ["<function=h>", '<function=g>"x"</function>', "<function=g>1"]),
        ("structural_tag", tag(**CALL), ['<tool_call>\n{"city": "x"}\n</tool_call>'], ["x", "<tool_call>\n{}"]),
        ("structural_tag", tag(type="sequence", elements=[NUMBER, {"type": "const_string", "value": ":"}, ANY]),
         ["1:", "12: text"], ["1", ":x"]),
        ("structural_tag", tag(type="or", elements=[NUMBER, CALL]), ["1"], ["1<tool_call>"]),
        ("structural_tag", tag(type="tag", begin="<a>", content=ANY, end=["</a>", "</tool_call>"]),
         ["<a>x</a>", "<a>x</tool_call>"], ["<a>x", "<a>x</a>y"]),
        ("structural_tag", tag(type="tag", begin="<a>", content={"type": "grammar", "grammar": 'start: "b"+'}, end=""),
         ["<a>bb"], ["<a>"]),
        ("structural_tag", tag(type="triggered_tags", triggers=["<tool_call>"], tags=[CALL]),
         ["text", 'x<tool_call>\n{"city": "y"}\n</tool_call>z'], ["<tool_call>x"]),
        ("structural_tag", tag(type="triggered_tags", triggers=["<tool_call>"], tags=[CALL], at_least_one=True),
         ['x<tool_call>\n{"city": "y"}\n</tool_call>z'], ["text"]),
        ("structural_tag",
         tag(type="triggered_tags", triggers=["<tool_call>"], tags=[CALL], at_least_one=True, stop_after_first=True),
         ['x<tool_call>\n{"city": "y"}\n</tool_call>'], ['x<tool_call>\n{"city": "y"}\n</tool_call>z']),
        ("structural_tag", tag(type="tags_with_separator", tags=[{**CALL, "content": NUMBER}], separator=","),
         ["", "<tool_call>\n1\n</tool_call>,<tool_call>\n2\n</tool_call>"], ["<tool_call>\n1\n</tool_call>,"]),
    ],
)  # fmt: skip
def test_the_grammar_allows_what_the_source_says(kind: str, text: Any, good: list[str], bad: list[str]) -> None:
    grammar, _ = compiled(source(kind, text))
    assert [each for each in good if not accepts(grammar, each)] == []
    assert [each for each in bad if accepts(grammar, each)] == []


@examples(60)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6))
def test_every_choice_is_possible_and_nothing_else(choices: list[str]) -> None:
    grammar, _ = compiled(source("choice", choices))
    assert all(accepts(grammar, each) for each in choices)
    other = "".join(choices) + "!"
    assert not accepts(grammar, other)


@pytest.mark.parametrize("choices_case", ["short", "long", "prefixes"])
def test_as_many_choices_as_are_documented_are_possible(choices_case: str) -> None:
    texts = {
        "short": [str(each) for each in range(MAX_CHOICES)],
        "long": [f"{each * 7919 % MAX_CHOICES} {'x' * 80}" for each in range(MAX_CHOICES)],
        "prefixes": ["x" * (1 + each % 60) + str(each) for each in range(MAX_CHOICES)],
    }[choices_case]
    grammar, _ = compiled(source("choice", texts))
    assert all(accepts(grammar, each) for each in (texts[0], texts[MAX_CHOICES // 2], texts[-1]))
    assert not accepts(grammar, texts[-1] + "x") and not accepts(grammar, texts[-1][:-1] + "y")


@pytest.mark.parametrize(
    "options, good, bad",
    [
        ({"disable_any_whitespace": True}, '{"city":"x","y":1}', '{"city": "x"}'),
        ({"whitespace_pattern": " ?"}, '{"city": "x"}', '{"city":  "x"}'),
        ({"disable_additional_properties": True}, '{"city": "x"}', '{"city": "x", "y": 1}'),
    ],
)
def test_options_of_vllm_narrow_json(options: dict[str, Any], good: str, bad: str) -> None:
    narrow, _ = compiled(source("json_schema", CITY, **options))
    wide, _ = compiled(source("json_schema", CITY))
    assert accepts(narrow, good) and not accepts(narrow, bad)
    assert accepts(wide, good) and accepts(wide, bad)


def test_what_cannot_be_enforced_is_told_and_left_out_unless_strict() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^(?=x)y"},
            "b": {"type": "array", "uniqueItems": True},
            "pattern": {"const": "(?=x)"},
        },
        "patternProperties": {"^x": {"type": "integer"}, "y$": {"type": "string"}},
        "additionalProperties": False,
    }
    grammar, warnings = compiled(source("json_schema", schema))
    assert accepts(grammar, '{"a": "q", "b": [1, 1], "pattern": "(?=x)", "xa": 1}')
    assert not accepts(grammar, '{"a": "q", "b": [1, 1], "pattern": "y"}')
    for keyword in ("pattern", "patternProperties", "uniqueItems"):
        assert any(keyword in each for each in warnings)
    del schema["patternProperties"], schema["properties"]["b"]
    with pytest.raises(AssertionError, match="look-around"):
        compiled(source("json_schema", schema, strict=True))


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return {"const": value}


@pytest.mark.parametrize(
    "kind, text, code",
    [
        ("json_schema", "{", "BAD_GRAMMAR"),
        ("json_schema", '{"const": NaN}', "BAD_GRAMMAR"),
        ("json_schema", "[1]", "BAD_GRAMMAR"),
        ("json_schema", "false", "BAD_GRAMMAR"),
        ("json_schema", nested(MAX_DEPTH), "GRAMMAR_TOO_LARGE"),
        ("json_schema", "[" * 100_000, "GRAMMAR_TOO_LARGE"),
        ("json_schema", {"enum": list(range(MAX_CHOICES + 1))}, "GRAMMAR_TOO_LARGE"),
        ("json_schema", {"const": "x" * MAX_GRAMMAR_BYTES}, "GRAMMAR_TOO_LARGE"),
        ("choice", "[]", "BAD_GRAMMAR"),
        ("choice", "[1]", "BAD_GRAMMAR"),
        ("choice", [str(each) for each in range(MAX_CHOICES + 1)], "GRAMMAR_TOO_LARGE"),
        ("grammar", "root ::= (", "BAD_GRAMMAR"),
        ("structural_tag", {}, "BAD_GRAMMAR"),
        ("structural_tag", tag(type="magic"), "BAD_GRAMMAR"),
        ("structural_tag", tag(type="sequence", elements=[ANY, NUMBER]), "BAD_GRAMMAR"),
        ("structural_tag", tag(type="tag", begin="a", content=NUMBER), "BAD_GRAMMAR"),
        ("structural_tag", {**LEGACY_TAG, "triggers": ["<tool"]}, "BAD_GRAMMAR"),
        ("structural_tag", {**LEGACY_TAG, "structures": []}, "BAD_GRAMMAR"),
        ("structural_tag", {**LEGACY_TAG, "structures": [1]}, "BAD_GRAMMAR"),
    ],
)
def test_bad_sources_are_refused_with_a_fix(kind: str, text: Any, code: str) -> None:
    with pytest.raises(GrammarRefused) as caught:
        compiled(source(kind, text))
    assert caught.value.code == code and caught.value.fix


def test_a_schema_as_deep_as_the_bound_compiles() -> None:
    compiled(source("json_schema", nested(MAX_DEPTH - 2)))


def test_equal_sources_have_equal_text_in_which_the_order_of_properties_stays() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b", "a"]}
    text, _ = compiled(source("json_schema", schema))
    assert text == compiled(source("json_schema", json.dumps(schema, indent=4)))[0]
    assert accepts(text, '{"b": 1, "a": 2}') and not accepts(text, '{"a": 1, "b": 2}')


THINK = {"reasoning_parser": "qwen3"}
ASSUMED = {"reasoning_parser": "deepseek_r1"}


@pytest.mark.parametrize(
    "parsers, prompt_end, good, bad",
    [
        (THINK, "unknown", ["<think>so\n</think>\n\nyes", "yes"], ["so</think>yes", "<think>yes", "so yes"]),
        (THINK, "thinking", ["so</think>\nyes", "</think>yes"], ["yes", "so</think>", "so</think>no"]),
        (THINK, "answering", ["yes"], ["<think>so</think>yes"]),
        (ASSUMED, "unknown", ["so</think>yes", "<think>so</think>yes"], ["yes"]),
        ({"reasoning_parser": "granite"}, "unknown",
         ["Here is my thought process: x Here is my response: yes", "yes"], ["Here is my thought process: yes"]),
        ({}, "unknown", ["yes"], ["<think>so</think>yes"]),
    ],
)  # fmt: skip
def test_the_constraint_begins_behind_reasoning(
    parsers: dict[str, str], prompt_end: Any, good: list[str], bad: list[str]
) -> None:
    grammar, _ = compiled(source("choice", ["yes"], reasoning=True, prompt_end=prompt_end), output_format(**parsers))
    assert [each for each in good if not accepts(grammar, each)] == []
    assert [each for each in bad if accepts(grammar, each)] == []


def test_without_a_chat_reasoning_is_no_part_of_the_answer() -> None:
    grammar, _ = compiled(source("choice", ["yes"], prompt_end="thinking"), output_format(**THINK))
    assert accepts(grammar, "yes") and not accepts(grammar, "so</think>yes")
