"""`prepare_schema` prepares a user's JSON schema for llguidance: it adds options, and removes what llguidance cannot
enforce, with a warning.

In its lenient mode, llguidance itself ignores unknown keywords and formats with a warning. But it refuses patterns that
its regular expressions do not support, and patterns of property names that overlap. This file removes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher

from quire_tokenizer.grammar.grammar_source import MAX_CHOICES, bad_grammar, too_large
from quire_tokenizer.grammar.json_text import canonical_json, children

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_tokenizer.grammar.grammar_source import GrammarSource

# Keywords whose value is an object of schemas.
_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# Keywords whose value is a schema or a list of schemas.
_SUBSCHEMAS: Final = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems"),
    *("unevaluatedItems", "not", "if", "then", "else", "contentSchema", "items", "prefixItems", "allOf", "anyOf"),
    "oneOf",
)
# Keywords that do not change what is valid. Canonical text does not have them.
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_OPTIONS: Final = "x-guidance"
# Whitespace between values: some spaces, or a new line with indentation. Without a limit, small models write whitespace
# for ever.
_WHITESPACE: Final = r"[ \t]{1,4}|\r?\n[ \t]{0,32}"


def prepare_schema(value: Any, source: GrammarSource, warnings: list[str]) -> dict[str, Any]:
    """Return a copy of the schema with llguidance's options, without annotations such as titles. `true` is the empty
    schema. With `disable_additional_properties` of the source, schemas that name properties are closed to others,
    unless they say otherwise (see `_close`). With a source that is not `strict`, patterns that llguidance cannot
    enforce are removed, with a note in `warnings`; with a strict one, they stay, so that compiling refuses the schema.
    Raises GrammarRefused for a value that is neither an object nor `true`, or has an enum of more than MAX_CHOICES
    values."""
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise bad_grammar("The schema is no object.", 'Send an object, such as {"type": "object"}.')
    schema: dict[str, Any] = _copied(value)
    for part in _parts(schema):
        for key in _ANNOTATIONS & part.keys():
            del part[key]
        values = part.get("enum")
        if isinstance(values, list) and len(values) > MAX_CHOICES:
            raise too_large(
                f"An enum has {len(values)} values, at most {MAX_CHOICES} are possible.", "Shorten enum.", "enum"
            )
        if source.disable_additional_properties:
            _close(part)
        if not source.strict:
            _drop_patterns(part, warnings)
    schema[_OPTIONS] = _options(source)
    return schema


def _options(source: GrammarSource) -> dict[str, Any]:
    """Return llguidance's options for a schema: it may take oneOf for anyOf, it is lenient about keywords that it
    cannot enforce (unless the source is strict), and the white space that an answer may have."""
    options: dict[str, Any] = {"coerce_one_of": True, "lenient": not source.strict}
    if source.disable_any_whitespace:
        return {"whitespace_flexible": False, **options}
    return {"whitespace_pattern": source.whitespace_pattern or _WHITESPACE, **options}


def _copied(value: Any) -> Any:
    """Return a deep copy of a value of JSON."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas in it, as dicts that the caller may change. Other values, such as those of an
    enum, are no schemas."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            yield part
            for key in _SCHEMA_MAPS:
                waiting.extend(children(part.get(key)))
            waiting.extend(part[key] for key in _SUBSCHEMAS if key in part)


def _close(part: dict[str, Any]) -> None:
    """Set `additionalProperties` to false in a schema that names properties or patterns of them, as vLLM does. A schema
    that has the keyword already stays as it is."""
    names = isinstance(part.get("properties"), dict) or isinstance(part.get("patternProperties"), dict)
    if names and "additionalProperties" not in part:
        part["additionalProperties"] = False


def _drop_patterns(part: dict[str, Any], warnings: list[str]) -> None:
    """Remove `pattern` and `patternProperties` where llguidance cannot enforce them, and append the cause to
    `warnings`. If no additional properties were allowed, they then are, with the values of any of the patterns."""
    pattern = part.get("pattern")
    if isinstance(pattern, str) and (fault := _fault_of({"type": "string", "pattern": pattern})):
        del part["pattern"]
        warnings.append(f"pattern is not enforced: {fault}")
    named = part.get("patternProperties")
    if isinstance(named, dict):
        open_patterns = {"patternProperties": dict.fromkeys(named, True)}
        if fault := _fault_of(open_patterns):
            del part["patternProperties"]
            # Property names that the patterns allowed stay allowed, with the values of any of the patterns.
            if part.get("additionalProperties") is False:
                part["additionalProperties"] = {"anyOf": list(named.values())} if named else False
            warnings.append(f"patternProperties is not enforced: {fault}")


def _fault_of(schema: dict[str, Any]) -> str:
    """Return the reason why llguidance cannot enforce a schema; empty: it can."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(canonical_json({"grammars": [{"json_schema": schema}]}))
    return error_line(messages[0]) if wrong and messages else ""


def error_line(message: str) -> str:
    """Return the line of llguidance's message that states the error: the last that begins with `error:`, without this
    word, or else the first line. At most 300 characters."""
    lines = [line.strip() for line in message.strip().splitlines()]
    said = [line for line in lines if line.startswith("error:")]
    return (said[-1].removeprefix("error:").strip() if said else lines[0] if lines else "")[:300]
