"""The grammar of tool calls as a list of Python calls, which pythonic_calls.py reads.

Values are Python literals: True, False and None, and texts in either kind of quotes. Numbers are JSON of their schema,
and so are texts whose schema says more than their type; Python reads both in the same way. Of lists and objects, the
grammar checks the types of items and properties.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from quire_tokenizer.output_parsing.call_grammar import CallGrammar, any_of, list_of, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_tokenizer.output_parsing.call_grammar import GrammarWriter, ToolFunction, WantedCalls

_MAX_LEVELS: Final = 16
_QUOTED: Final = r"{0}([^{0}\\\x00-\x1f\x7f]|\\[{0}\\nrt])*{0}"
_STRING: Final = f"/{_QUOTED.format(chr(34))}|{_QUOTED.format(chr(39))}/"
_CONSTANTS: Final = {"boolean": '("True" | "False")', "null": '"None"'}
_TYPES: Final = ("string", "integer", "number", *_CONSTANTS, "array", "object")
_OF_TEXTS: Final = frozenset({"pattern", "minLength", "maxLength", "format"})
# The escapes of JSON that mean the same in Python.
_ESCAPES: Final = 'nrtbf\\"'


class _Root(NamedTuple):
    """The schema of a tool's parameters, and the expressions that are written once for each level of nesting: those of
    any value, which all tools share, under '', and those of references under the tool's name and the path."""

    tool: str
    schema: dict[str, Any]
    known: dict[tuple[str, int], str]


def write_calls(writer: GrammarWriter, wanted: WantedCalls) -> CallGrammar:
    """Write the grammar of a list of calls in brackets; it has one call unless several are wanted. No marker comes
    before it."""
    known: dict[tuple[str, int], str] = {}
    call = any_of(writer, [_call(writer, tool, known) for tool in wanted.tools])
    calls = list_of(writer, call, ", ", parallel=wanted.parallel)
    return CallGrammar("", f"{writer.literal('[')} {calls} {writer.literal(']')}")


def _call(writer: GrammarWriter, tool: ToolFunction, known: dict[tuple[str, int], str]) -> str:
    """Return the expression of a call with keyword arguments in the order of the schema. Those that are not required
    may be left out."""
    root, required = _Root(tool.name, tool.parameters, known), tool.parameters.get("required")
    needed = set(required) if isinstance(required, list) else set()
    arguments = [
        (f"{writer.literal(f'{key}=')} {_value(writer, schema, root, 0)}", key in needed)
        for key, schema in tool.properties.items()
    ]
    return f"{writer.literal(f'{tool.name}(')} {_sequence(writer, arguments)} {writer.literal(')')}"


def _sequence(writer: GrammarWriter, parts: Sequence[tuple[str, bool]]) -> str:
    """Return the expression of parts in this order, with commas between them. Each part says whether it is required;
    the others may be left out."""
    comma, rest, empty = writer.literal(", "), "", True
    # From the last to the first: `rest` is what may follow a part, comma included.
    heads = list[str]()
    for part, needed in reversed(parts):
        whole = f"{part} {rest}".strip()
        if needed:
            heads, empty = [whole], False
            rest = writer.add_rule("more", f"{comma} {whole}")
        else:
            heads.insert(0, whole)
            rest = writer.add_rule("more", f"({comma} {whole}{f' | {rest}' if rest else ''}){'?' if empty else ''}")
    if not heads:
        return '""'
    return writer.add_rule("arguments", " | ".join(heads)) + ("?" if empty else "")


def _value(writer: GrammarWriter, schema: Any, root: _Root, level: int) -> str:
    """Return the expression of a Python literal that follows a schema, as far as this grammar supports it. The first of
    these that the schema has decides: a reference, const, enum, anyOf, oneOf, types. A schema without any of them
    allows any literal. From _MAX_LEVELS on, anyOf and oneOf are ignored, and lists and objects are empty. `root` is the
    whole schema, in which references are looked up, and `level` the depth of nesting."""
    path = schema.get("$ref") if isinstance(schema, dict) and schema else ""
    if not isinstance(path, str):
        return _literal_of(writer, schema, root, level)
    key = f"{root.tool} {path}" if path else "", level
    if key not in root.known:
        root.known[key] = _literal_of(writer, _resolved(schema, root.schema), root, level)
    return root.known[key]


def _literal_of(writer: GrammarWriter, schema: dict[str, Any], root: _Root, level: int) -> str:
    """Return the expression of a schema that is no reference: of its const, else its enum, else its anyOf or oneOf
    (only below _MAX_LEVELS), else its types. Without any of them, of any literal; see `_value`."""
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return any_of(writer, [writer.literal(each) for value in values for each in _written(value)])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key] and level < _MAX_LEVELS:
            return any_of(writer, [_value(writer, each, root, level + 1) for each in schema[key]])
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list) or not types:
        types = [*_TYPES]
    return any_of(writer, [_typed(writer, str(each), schema, root, level) for each in types])


def _typed(writer: GrammarWriter, kind: str, schema: dict[str, Any], root: _Root, level: int) -> str:
    """Return the expression of a literal of one type. Numbers, and strings with a pattern, length or format, are JSON
    of their schema. Lists and objects check their items and properties; at _MAX_LEVELS they are empty. An object whose
    schema has no properties may have any, and a list without `items` any items. Other strings, and unknown types, are
    any text in quotes."""
    if kind in ("integer", "number") or (kind == "string" and _OF_TEXTS & schema.keys()):
        alone = part_of(root.schema, {**schema, "type": kind})
        return writer.add_schema(
            {**alone, "x-guidance": {**alone.get("x-guidance", {}), "json_allowed_escapes": _ESCAPES}}
        )
    if kind not in ("array", "object"):
        return _CONSTANTS.get(kind, _STRING)
    if level >= _MAX_LEVELS:
        return '"[]"' if kind == "array" else '"{}"'
    if kind == "array":
        item, comma = _value(writer, schema.get("items"), root, level + 1), writer.literal(", ")
        return writer.add_rule("array", f'"[" ({item} ({comma} {item})*)? "]"')
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not properties:
        pair, comma = f'{_STRING} ": " {_value(writer, {}, root, level + 1)}', writer.literal(", ")
        return writer.add_rule("object", f'"{{" ({pair} ({comma} {pair})*)? "}}"')
    needed, colon = set(required) if isinstance(required, list) else set(), writer.literal(": ")
    parts = []
    for key, each in properties.items():
        keys = any_of(writer, [writer.literal(form) for form in _written(key)])
        parts.append((f"{keys} {colon} {_value(writer, each, root, level + 1)}", key in needed))
    return writer.add_rule("object", f'"{{" {_sequence(writer, parts)} "}}"')


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema to which the references of a schema lead within `root`; an empty schema if they lead nowhere,
    or through more than _MAX_LEVELS schemas. A path leads through objects only; `#` alone leads nowhere. Keywords
    beside a reference are ignored."""
    for _ in range(_MAX_LEVELS):
        if not isinstance(schema, dict):
            return {}
        found = schema.get("$ref")
        if not isinstance(found, str):
            return schema
        schema = root
        for step in found.removeprefix("#/").split("/"):
            schema = schema.get(step) if isinstance(schema, dict) else None
    return {}


def _written(value: Any) -> list[str]:
    """Return the Python literals of a value."""
    return list({json.dumps(value, ensure_ascii=False): 0, repr(value): 0}) if isinstance(value, str) else [repr(value)]
