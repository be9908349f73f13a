"""Types of the parameters of a request's tools, for families that write values without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire_tokenizer.output_parsing.json_values import ENCODER

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "boolean": bool,
    "null": type(None),
}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class ToolSchemas:
    """The tools of a request: OpenAI's `tools`, or the bare functions."""

    def __init__(self, tools: object) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools if isinstance(tools, list) else []:
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(function, dict) and isinstance(name, str):
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, dict) else None
                self._parameters[name] = properties if isinstance(properties, dict) else {}

    @property
    def names(self) -> frozenset[str]:
        """The tools' names."""
        return frozenset(self._parameters)

    def is_text(self, tool: str, parameter: str) -> bool:
        """Whether the value is written as a string, because the schema allows nothing else or does not say. A parser
        may write such a value before its end has come."""
        return self.types(tool, parameter) <= {"string"}

    def value(self, tool: str, parameter: str, text: str) -> str:
        """Return the value as JSON. If the text is JSON of a type other than string that the parameter allows, this is
        the text without white space around it; else it is the whole text as a JSON string. If a boolean is allowed,
        True and False, in capital letters or not, become `true` and `false`."""
        types = self.types(tool, parameter)
        plain = text.strip()
        try:
            found = _DECODER.decode(plain)
        except (ValueError, RecursionError):
            lower = plain.lower()
            if "boolean" in types and lower in ("true", "false"):
                return lower
            return ENCODER.encode(text)
        return plain if any(_is_of(found, kind) for kind in types - {"string"}) else ENCODER.encode(text)

    def types(self, tool: str, parameter: str) -> set[str]:
        """Return the names of the types that the parameter allows; empty: the schema does not say."""
        return _types_of(self._parameters.get(tool, {}).get(parameter), 0)


def _types_of(schema: Any, depth: int) -> set[str]:
    """Return the names of the types that a schema allows by `type`, anyOf, oneOf and allOf, or else those of its enum's
    values. References and const are not looked at. Empty: the schema does not say, or is nested too deeply. `depth`
    counts the schemas around this one."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    found = schema.get("type")
    types = (
        {found}
        if isinstance(found, str)
        else {each for each in found if isinstance(each, str)}
        if isinstance(found, list)
        else set()
    )
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else []:
            types |= _types_of(each, depth + 1)
    if not types and isinstance(schema.get("enum"), list):
        types = {_name_of(each) for each in schema["enum"]}
    return types


def _name_of(value: object) -> str:
    """Return the name of a value's type in JSON schemas; integers are "number" too."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "string")


def _is_of(value: object, kind: str) -> bool:
    """Whether a value has this type of JSON schemas. A bool is no number, and 1.0 is no integer. False for "string" and
    for names of no type."""
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind]) if kind in _TYPES else False
