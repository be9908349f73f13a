"""Converts field tables to JSON schemas, and builds the schemas of answers. Objects in answers are closed: the schema
names every member."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from quire_router.front.parameters.fields import MAX_ID_DIGITS, MAX_NAME_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quire_router.front.parameters.fields import Field

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    """Return the schema of a list of these items."""
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    """Return the schema of a value of this schema, or null."""
    return {"anyOf": [schema, NULL]}


def const(value: str) -> Schema:
    """Return the schema of this one string."""
    return {"const": value}


def one_of(*values: str) -> Schema:
    """Return the schema of any of these strings."""
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that matches any of these schemas."""
    return {"anyOf": list(schemas)}


def closed(members: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that has these members and no others; the optional ones may be missing."""
    return {
        "type": "object",
        "properties": {**members, **(optional or {})},
        "required": list(members),
        "additionalProperties": False,
    }


def body_schema(table: Mapping[str, Field], required: Iterable[str] = ()) -> Schema:
    """Return the schema of a request's body, an object with exactly the fields of the table. Fields that are not
    `required` may be null, which means not given."""
    needed = set(required)
    fields = {
        name: field_schema(field) if name in needed else _optional(field_schema(field)) for name, field in table.items()
    }
    return {"type": "object", "properties": fields, "required": sorted(needed), "additionalProperties": False}


def field_schema(field: Field) -> Schema:
    """Return the schema of one field, with its finite bounds and a default that is not empty. An unsupported field only
    has a description, which names the values that are accepted. A field of strings takes one string or a list. Token
    ids of biases are names, for which a schema can say the digits, but not the bounds."""
    if not field.supported:
        told = "Not supported by this version"
        neutral = ", ".join(map(repr, field.neutral))
        return {"description": f"{told}, but as {neutral}." if neutral else f"{told}."}
    schema = dict(_KINDS[field.kind])
    bounds = schema.pop("bounds", ())
    limits = zip(bounds, (field.low, field.high, field.max_items), strict=False)
    schema |= {
        name: value for name, value in limits if name and math.isfinite(value) and (name not in _COUNTS or value)
    }
    if field.kind == "strings":
        item = {"type": "string", "minLength": 1, "maxLength": field.high}
        schema = {"anyOf": [item, {"type": "array", "items": item, "maxItems": field.max_items}]}
    if field.kind == "ints":
        limits = zip(("minimum", "maximum"), (field.low, field.high), strict=True)
        schema["items"] = INTEGER | {name: value for name, value in limits if math.isfinite(value)}
    if field.kind == "biases":
        schema["propertyNames"] = {"pattern": f"^[0-9]{{1,{MAX_ID_DIGITS}}}$"}
    if field.kind == "texts":
        schema["propertyNames"] = {"maxLength": MAX_NAME_CHARS}
        schema["additionalProperties"] = {"type": "string", "maxLength": field.high}
    if field.default not in (None, "", ()):
        schema["default"] = field.default
    return schema


_COUNTS = ("maxLength", "maxItems", "maxProperties")
_KINDS: Mapping[str, Schema] = {
    "int": {"type": "integer", "bounds": ("minimum", "maximum")},
    "number": {"type": "number", "bounds": ("minimum", "maximum")},
    "bool": {"type": "boolean"},
    "string": {"type": "string", "bounds": ("", "", "maxLength")},
    "strings": {},
    "ints": {"type": "array", "bounds": ("", "", "maxItems")},
    "biases": {"type": "object", "additionalProperties": NUMBER, "bounds": ("", "", "maxProperties")},
    "texts": {"type": "object", "bounds": ("", "", "maxProperties")},
    "object": {"type": "object"},
    "list": {"type": "array", "bounds": ("", "", "maxItems")},
    "any": {},
}


def _optional(schema: Schema) -> Schema:
    """Return a copy of the schema that also allows null. A schema with neither `type` nor `anyOf` allows null already,
    and is returned itself."""
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    return schema
