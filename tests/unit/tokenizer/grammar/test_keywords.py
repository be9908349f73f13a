"""The table of keywords in docs/structured.md says what is true of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quire_tokenizer.grammar.compile_child import Compiler
from quire_tokenizer.grammar.grammar_source import GrammarRefused
from tests.unit.tokenizer.grammar.matching import DEMO, added, source

PAGE = Path(__file__).resolve().parents[4] / "docs" / "structured.md"
THING = {"type": "object"}
# A schema with each keyword, where a value alone does not make one.
EXAMPLES: dict[str, dict[str, Any]] = {
    "type": {"type": "string"},
    "enum": {"enum": ["a", 1]},
    "const": {"const": {"a": 1}},
    "properties": {"type": "object", "properties": {"a": {}}},
    "required": {"type": "object", "required": ["a"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {}, "^b": {}}},
    "minProperties": {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
    "maxProperties": {"type": "object", "properties": {"a": {}}, "required": ["a"], "maxProperties": 2},
    "items": {"type": "array", "items": {"type": "string"}},
    "prefixItems": {"type": "array", "prefixItems": [{}, {"type": "string"}]},
    "minItems": {"type": "array", "minItems": 2},
    "maxItems": {"type": "array", "maxItems": 2},
    "minLength": {"type": "string", "minLength": 2},
    "maxLength": {"type": "string", "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^a+$"},
    "multipleOf": {"type": "number", "multipleOf": 0.5},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}},
    "$anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "string"}}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "minContains": {"type": "array", "minContains": 2},
    "maxContains": {"type": "array", "maxContains": 2},
    "not": {"not": {"type": "string"}},
    "if": {"if": THING},
    "then": {"then": THING},
    "else": {"else": THING},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": THING}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}}},
    **{name: {"type": "integer", name: 3} for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
}
# The table's words for the limits of a keyword that is enforced.
BEYOND: dict[str, dict[str, Any]] = {
    "patternProperties": {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
    "minProperties": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
    "pattern": {"type": "string", "pattern": "^(?=a)"},
    "format": {"type": "string", "format": "json-pointer"},
    "$ref": {"$ref": "https://example.com/a.json"},
}


def rows() -> dict[str, str]:
    """Return the page's row of each keyword."""
    table = PAGE.read_text().partition("## Keywords of JSON schemas")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    return {name: said for names, said in lines for name in re.findall(r"`(.+?)`", names)}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    model = {"tokenizer": DEMO.read_text(), "eos": [4, 1], "added": added(), "tool_parser": "", "reasoning_parser": ""}
    return Compiler(model)


def test_the_table_has_all_keywords() -> None:
    assert set(rows()) == {*EXAMPLES, "format"}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_keyword_is_enforced_or_refused_as_the_table_says(name: str, compiler: Compiler) -> None:
    schema, enforced = EXAMPLES[name], rows()[name] != "no"
    lenient = compiler.compile(source("json_schema", schema))[1]
    if enforced:
        compiler.compile(source("json_schema", schema, strict=True))
        assert not lenient or name == "oneOf"
        return
    assert any(f'"{name}"' in each for each in lenient)
    with pytest.raises(GrammarRefused) as caught:
        compiler.compile(source("json_schema", schema, strict=True))
    assert (caught.value.code, caught.value.param) == ("UNSUPPORTED_KEYWORD", name)


def test_each_format_of_the_table_is_enforced(compiler: Compiler) -> None:
    formats = re.findall(r"`(.+?)`", rows()["format"])
    assert len(formats) == 10
    for name in formats:
        assert not compiler.compile(source("json_schema", {"type": "string", "format": name}, strict=True))[1]


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_beyond_what_the_table_says_a_strict_schema_is_refused_by_its_keyword(name: str, compiler: Compiler) -> None:
    with pytest.raises(GrammarRefused) as caught:
        compiler.compile(source("json_schema", BEYOND[name], strict=True))
    assert (caught.value.code, caught.value.param) == ("UNSUPPORTED_KEYWORD", name)
    if name != "$ref":
        assert compiler.compile(source("json_schema", BEYOND[name]))[1]
