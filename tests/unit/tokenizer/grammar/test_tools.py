"""Grammars of tool calls: what they allow, the family's parser reads as calls whose arguments follow their schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from quire_tokenizer.grammar.canonical_text import ModelOutputFormat
from quire_tokenizer.grammar.grammar_source import TOOLS, GrammarRefused
from quire_tokenizer.output_parsing.answer_parsers import AnswerParsers, ParseOptions
from tests.tiers import SCENARIOS
from tests.unit.tokenizer.answer_texts import WRITERS, Call, Render
from tests.unit.tokenizer.chat.test_output_parsing import parse, summary
from tests.unit.tokenizer.grammar.matching import accepts, added, compiled, source, tokenizer

WALKS = SCENARIOS or 5
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "rain": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
FIND = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "integer"}}}}
SCHEMAS = {"get_weather": WEATHER, "find": FIND, "now": {"type": "object"}}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    more = {"strict": True} if strict else {}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in SCHEMAS.items()
    ]


CALLS: list[Call] = [
    ("get_weather", {"city": "Bonn", "days": 3, "unit": "c", "where": {"x": 1}}),
    ("find", {"tags": [1, 2]}),
    ("get_weather", {"city": "", "days": 0}),
]
CASES = [
    pytest.param(name, *writer, id=f"{name}-{writer[0].__name__}") for name, each in WRITERS.items() for writer in each
]
# Markers of families that are tokens there; the demo model's vocabulary has spare ones for them.
TOKENS = {"granite": ["<|tool_call|>"], "mistral_named": ["[ARGS]", "[TOOL_CALLS]"], "mistral_list": ["[TOOL_CALLS]"]}


@lru_cache
def form_of(name: str, writer: str = "", reasoning: str = "") -> ModelOutputFormat:
    spare = [number for text, number in added().items() if text.startswith("<|reserved")]
    special = dict(zip(TOKENS.get(writer, ()), spare, strict=False))
    return ModelOutputFormat({**added(), **special}, name, reasoning)


def tokens_of(answer: str, output_format: ModelOutputFormat) -> list[int]:
    """The tokens of an answer, in which added tokens are tokens."""
    pattern = "|".join(map(re.escape, sorted(output_format.added, key=len, reverse=True)))
    ids: list[int] = []
    for piece in re.split(f"({pattern})", answer):
        ids += [output_format.added[piece]] if piece in output_format.added else tokenizer().tokenize_str(piece)
    return ids


def allows(text: str, answer: str, output_format: ModelOutputFormat) -> bool:
    matcher, ids = LLMatcher(tokenizer(), text, log_level=0), tokens_of(answer, output_format)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar(output_format: ModelOutputFormat, *, strict: bool = False, **options: Any) -> str:
    return compiled(source(TOOLS, tools(strict=strict), **options), output_format)[0]


def written(render: Render, calls: Sequence[Call], text: str = "") -> str:
    return render(text, calls).removesuffix("<|call|>")


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_what_a_family_writes_is_allowed(name: str, render: Render, has_text: bool) -> None:
    output_format = form_of(name, render.__name__)
    if render.__name__ == "llama3_tagged":
        pytest.skip("calls are written without the tag, which is for tools that the server runs")
    several = name != "openai"
    required = grammar(output_format, required=True, parallel=True)
    lazy = grammar(output_format, strict=True, parallel=True)
    for text in (required, lazy):
        assert allows(text, written(render, CALLS[:1]), output_format)
        assert allows(text, written(render, CALLS), output_format) == several
    assert not allows(required, "Hello", output_format) and not allows(required, "", output_format)
    plain = render("Hello", []) if name != "openai" else "<|channel|>final<|message|>Hello"
    assert allows(lazy, plain, output_format)
    if has_text and several:
        assert allows(lazy, written(render, CALLS, "Hello "), output_format)


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_one_call_or_one_tool_alone_can_be_asked_for(name: str, render: Render, has_text: bool) -> None:
    output_format = form_of(name, render.__name__)
    if render.__name__ == "llama3_tagged":
        return
    single = grammar(output_format, required=True, parallel=False)
    assert allows(single, written(render, CALLS[:1]), output_format) and not allows(
        single, written(render, CALLS[:2]), output_format
    )
    named = grammar(output_format, required=True, tool="find")
    assert allows(named, written(render, CALLS[1:2]), output_format) and not allows(
        named, written(render, CALLS[:1]), output_format
    )


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_arguments_that_break_their_schema_are_impossible(name: str, render: Render, has_text: bool) -> None:
    output_format = form_of(name, render.__name__)
    if render.__name__ == "llama3_tagged":
        return
    for text in (grammar(output_format, required=True), grammar(output_format, strict=True)):
        for arguments in ({"city": "a"}, {"city": "a", "days": "x"}, {"city": "a", "days": 1, "unit": "k"}):
            assert not allows(text, written(render, [("get_weather", arguments)]), output_format)
        assert not allows(text, written(render, [("unheard_of", {})]), output_format)


@lru_cache
def enders() -> list[int]:
    return [each for each in range(tokenizer().vocab_size) if tokenizer().decode_bytes([each]) in b'"}]),; \n<0129']


def walk(text: str, seed: int, most: int = 250) -> list[int] | None:
    """Tokens of an answer that is drawn at random from a grammar, which ends as soon as it may; None: it is too
    long."""
    matcher, chance, ids = LLMatcher(tokenizer(), text, log_level=0), random.Random(seed), list[int]()
    while len(ids) < most:
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.9):
            return ids
        if forced := matcher.compute_ff_tokens():
            assert matcher.consume_tokens(forced)
            ids += forced
            continue
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~0b10010
        # Texts and numbers of any length must come to their end.
        short = [number for number in enders() if mask >> number & 1]
        if not short or chance.random() < 0.1:
            short = [number for number in range(tokenizer().vocab_size) if mask >> number & 1]
        ids.append(chance.choice(short))
        matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_whatever_the_grammar_allows_is_read_as_valid_calls(name: str, render: Render, has_text: bool) -> None:
    output_format = form_of(name, render.__name__)
    if render.__name__ == "llama3_tagged":
        return
    text = grammar(output_format, required=True, parallel=True)
    parsers = AnswerParsers({}, name, "")
    names = {number: marker for marker, number in output_format.added.items()}
    ended = 0
    for seed in range(WALKS):
        ids = walk(text, seed)
        if ids is None:
            continue
        ended += 1
        pieces = [names.get(number) or tokenizer().decode_bytes([number]) for number in ids]
        answer = b"".join(each.encode() if isinstance(each, str) else each for each in pieces).decode()
        content, calls = summary(parse(parsers, [answer], ParseOptions(tools(), calls=True)))
        assert calls and not content.strip(), answer
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called])  # type: ignore[arg-type]  # schemas are objects
    assert ended >= WALKS // 5


def test_reasoning_comes_before_the_calls() -> None:
    output_format = form_of("hermes", "", "qwen3")
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    unknown = grammar(output_format, required=True, reasoning=True)
    inside = grammar(output_format, required=True, reasoning=True, prompt_end="thinking")
    assert accepts(unknown, f"<think>so</think>\n\n{call}") and accepts(unknown, call)
    assert accepts(inside, f"so</think>{call}") and not accepts(inside, call)
    harmony = form_of("openai", "", "openai_gptoss")
    text = grammar(harmony, required=True, reasoning=True)
    message = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}"
    assert allows(text, f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{message}", harmony)
    assert allows(text, message, harmony)
    final = compiled(source("choice", ["yes"], reasoning=True), harmony)[0]
    answer = "<|channel|>final<|message|>yes"
    assert allows(final, f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{answer}", harmony)
    assert allows(final, answer, harmony) and not allows(final, "yes", harmony)


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_tools_that_are_not_strict_may_have_any_arguments_in_free_answers(
    name: str, render: Render, has_text: bool
) -> None:
    output_format = form_of(name, render.__name__)
    if render.__name__ == "llama3_tagged":
        return
    mixed = [tools(strict=True)[0], tools()[1]]
    text, _ = compiled(source(TOOLS, mixed, parallel=True), output_format)
    for arguments in ({}, {"tags": [1, 2]}, {"tags": "x"}, {"tags": {"a": None}}):
        assert allows(text, written(render, [("find", arguments)]), output_format)
    assert not allows(text, written(render, [("get_weather", {})]), output_format)


def test_what_is_not_enforced_names_its_tool() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}}
    _, warnings = compiled(source(TOOLS, [{"function": function}], required=True), form_of("hermes"))
    assert any(each.startswith("f: pattern") for each in warnings)


@pytest.mark.parametrize(
    "given, parser, options",
    [
        ("[]", "hermes", {}),
        (tools(), "hermes", {"tool": "unheard"}),
        (tools(), "", {}),
        ([{"function": "f"}, {"function": None}, "f"], "hermes", {}),
    ],
)
def test_calls_without_a_tool_or_a_parser_are_refused(given: Any, parser: str, options: dict[str, Any]) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(GrammarRefused, match="tool"):
        compiled(source(TOOLS, text, **options), form_of(parser))


def pythonic_calls(parameters: dict[str, Any]) -> str:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    return compiled(source(TOOLS, [{"function": function}], required=True), form_of("pythonic"))[0]


@pytest.mark.parametrize("value", ["1", "'x'", "None", "[]", "[1, 'x', [True]]", "{}", "{'a': {'b': [1]}}"])
def test_a_python_argument_without_a_type_is_any_literal(value: str) -> None:
    text = pythonic_calls({"properties": {"a": {}, "b": {"type": "array"}}, "required": ["a"]})
    assert allows(text, f"[f(a={value})]", form_of("pythonic"))
    assert allows(text, f"[f(a=1, b=[{value}])]", form_of("pythonic"))
    assert not allows(text, f"[f(a={value}, b=1)]", form_of("pythonic"))


def test_a_python_argument_may_be_a_tree() -> None:
    """Its schema refers to itself twice, at each of many levels."""
    child = {"$ref": "#/$defs/node"}
    node = {"type": "object", "properties": {"left": child, "right": child, "n": {"type": "integer"}}}
    text = pythonic_calls({"properties": {"tree": child}, "required": ["tree"], "$defs": {"node": node}})
    tree = "{'left': {'right': {'n': 1}}, 'right': {'n': 2}}"
    assert allows(text, f"[f(tree={tree})]", form_of("pythonic"))
    assert not allows(text, f"[f(tree={tree.replace('2', 'True')})]", form_of("pythonic"))
