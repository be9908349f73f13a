"""Request fields: the type, bounds and default of each, and one function that checks a body against a table of fields.

A known field that this version does not support is accepted if its value changes nothing, and refused otherwise. An
unknown field is refused, and the error names the nearest known name. `null` means not given. This module knows no field
by name; tables.py has the fields.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson

from quire_common.errors import InvalidArgument
from quire_common.sequence import unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_INT32 = 2**31 - 1
# A name in an object of strings has at most so many characters.
MAX_NAME_CHARS = 64
# The most digits of a token id that is the name of a bias; leading zeros count.
MAX_ID_DIGITS = 10
_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `low` and `high` bound a number, each item of a list of integers, or each token id of biases; `high`
    also bounds the characters of each string in a list or an object. `max_items` bounds the items or members, and the
    characters of a single string (there, 0: any number). `neutral`: for an unsupported field, the values that are
    accepted because they change nothing."""

    kind: str
    default: Any = None
    low: float = -math.inf
    high: float = math.inf
    max_items: int = 0
    supported: bool = True
    neutral: tuple[Any, ...] = ()


_ANY_NUMBER = Field("number")
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


def check_fields(
    body: Mapping[str, Any], table: Mapping[str, Field], defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> dict[str, Any]:
    """Return every supported field of the table with its checked value or its default; `defaults` take precedence over
    the table's. A null in the body counts as not given. Raises InvalidArgument for a wrong value or an unknown name,
    and Unsupported for an unsupported field with a value that is not neutral."""
    values = {name: field.default for name, field in table.items() if field.supported}
    if defaults:
        values |= {name: value for name, value in defaults.items() if name in values}
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise _unknown(name, table)
        if value is None:
            continue
        if field.supported:
            values[name] = KINDS[field.kind](name, value, field)
        elif not any(value == neutral and type(value) is type(neutral) for neutral in field.neutral):
            raise unsupported(name)
    return values


def bad_type(name: str, value: Any, wanted: str) -> InvalidArgument:
    """Make the error for a value of a wrong type. The error names the type, never the value."""
    return InvalidArgument(
        "BAD_TYPE", f"{name} is {_type_name(value)}, not {wanted}.", f"Send {name} as {wanted}.", param=name
    )


def out_of_range(name: str, value: float, field: Field) -> InvalidArgument:
    """Make the error for a number outside the field's bounds; its fix names both bounds or the one that is finite (-inf
    if none is)."""
    if field.high == math.inf:
        wanted = f"of at least {field.low}"
    elif field.low == -math.inf:
        wanted = f"of at most {field.high}"
    else:
        wanted = f"from {field.low} to {field.high}"
    return InvalidArgument("OUT_OF_RANGE", f"{name} is {value}.", f"Choose a value {wanted}.", param=name)


def _check_int(name: str, value: Any, field: Field) -> int:
    """Return the value as an integer. 1.0 is an integer, true is not. Raises InvalidArgument for any other value, and
    for one outside the field's bounds."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_type(name, value, "an integer")
    if not field.low <= value <= field.high:
        raise out_of_range(name, value, field)
    return value


def _check_number(name: str, value: Any, field: Field) -> float:
    """Return the value as a float. Raises InvalidArgument for anything but a finite number within the field's bounds;
    true is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_type(name, value, "a number")
    if not field.low <= value <= field.high or not math.isfinite(value):
        raise out_of_range(name, value, field)
    return float(value)


def _check_bool(name: str, value: Any, _field: Field) -> bool:
    """Return the value if it is true or false; raise InvalidArgument otherwise."""
    if not isinstance(value, bool):
        raise bad_type(name, value, "true or false")
    return value


def _check_string(name: str, value: Any, field: Field) -> str:
    """Return the value. Raises InvalidArgument unless it is a string of at most `max_items` characters (0: any
    number)."""
    if not isinstance(value, str):
        raise bad_type(name, value, "a string")
    if field.max_items and len(value) > field.max_items:
        raise _too_many(name, len(value), "characters", field)
    return value


def _check_strings(name: str, value: Any, field: Field) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple. Raises InvalidArgument for another type, more than `max_items`
    strings, and a string that is empty or longer than `high` characters."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise bad_type(name, value, "a string or a list of strings")
    if len(items) > field.max_items:
        raise _too_many(name, len(items), "items", field)
    for item in items:
        if not isinstance(item, str):
            raise bad_type(f"{name}[]", item, "a string")
        if not item or len(item) > field.high:
            raise InvalidArgument(
                "BAD_STRING",
                f"{name} has a string of {len(item)} characters.",
                f"Send strings of 1 to {field.high} characters.",
                param=name,
            )
    return tuple(items)


def _check_ints(name: str, value: Any, field: Field) -> tuple[int, ...]:
    """Return a list of integers as a tuple. Raises InvalidArgument for another type, more than `max_items` items, and
    an item outside the field's bounds."""
    if not isinstance(value, list):
        raise bad_type(name, value, "a list of integers")
    if len(value) > field.max_items:
        raise _too_many(name, len(value), "items", field)
    if value and set(map(type, value)) == {int} and field.low <= min(value) and max(value) <= field.high:
        return tuple(value)  # as nearly all lists are: one by one, thousands take milliseconds of the event loop
    return tuple(_check_int(f"{name}[]", item, field) for item in value)


def _check_biases(name: str, value: Any, field: Field) -> tuple[tuple[int, float], ...]:
    """Convert an object from token ids, as decimal text, to biases into pairs (id, bias), by ascending id. Raises
    InvalidArgument for another type, more than `max_items` members, a name that is not an id within the field's bounds,
    two names of the same id (`1` and `01`), and a bias that is not a finite number."""
    if not isinstance(value, dict):
        raise bad_type(name, value, "an object of token ids and biases")
    if len(value) > field.max_items:
        raise _too_many(name, len(value), "items", field)
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not token.isascii() or not token.isdecimal() or len(token) > MAX_ID_DIGITS:
            raise InvalidArgument(
                "BAD_TYPE",
                f"{name} has the name {token[:64]!r}, which is not a token id.",
                "Name token ids, as decimal integers.",
                param=name,
            )
        token_id = _check_int(f"{name}.{token}", int(token), field)
        if token_id in found:
            raise InvalidArgument(
                "BAD_VALUE", f"{name} has the token id {token_id} twice.", "Name each token id once.", param=name
            )
        found[token_id] = _check_number(f"{name}.{token}", bias, _ANY_NUMBER)
    return tuple(sorted(found.items()))


def _check_texts(name: str, value: Any, field: Field) -> dict[str, str]:
    """Return the value. Raises InvalidArgument unless it is an object of at most `max_items` strings, each of at most
    `high` characters, with names of at most 64 characters."""
    if not isinstance(value, dict):
        raise bad_type(name, value, "an object of strings")
    if len(value) > field.max_items:
        raise _too_many(name, len(value), "pairs", field)
    for key, text in value.items():
        if len(key) > MAX_NAME_CHARS:
            raise InvalidArgument(
                "TOO_MANY_ITEMS",
                f"{name} has a name of {len(key)} characters; the limit is {MAX_NAME_CHARS}.",
                f"Send names of at most {MAX_NAME_CHARS} characters.",
                param=name,
            )
        _check_string(f"{name}.{key}", text, Field("string", max_items=int(field.high)))
    return value


def _check_object(name: str, value: Any, _field: Field) -> dict[str, Any]:
    """Return the value if it is a JSON object; raise InvalidArgument otherwise."""
    if not isinstance(value, dict):
        raise bad_type(name, value, "an object")
    return value


def _check_list(name: str, value: Any, field: Field) -> list[Any]:
    """Return the value; its items are not checked. Raises InvalidArgument unless it is a list of at most `max_items`
    items."""
    if not isinstance(value, list):
        raise bad_type(name, value, "a list")
    if len(value) > field.max_items:
        raise _too_many(name, len(value), "items", field)
    return value


def _check_any(_name: str, value: Any, _field: Field) -> Any:
    return value


KINDS: Mapping[str, Callable[[str, Any, Field], Any]] = {
    "int": _check_int,
    "number": _check_number,
    "bool": _check_bool,
    "string": _check_string,
    "strings": _check_strings,
    "ints": _check_ints,
    "biases": _check_biases,
    "texts": _check_texts,
    "object": _check_object,
    "list": _check_list,
    "any": _check_any,
}


def _too_many(name: str, count: int, of_what: str, field: Field) -> InvalidArgument:
    """Make the error for a field that has more items or characters than `max_items`."""
    return InvalidArgument(
        "TOO_MANY_ITEMS",
        f"{name} has {count} {of_what}; the limit is {field.max_items}.",
        f"Send at most {field.max_items} {of_what}.",
        param=name,
    )


def _unknown(name: str, table: Mapping[str, Field]) -> InvalidArgument:
    """Make the error for a field that the table lacks; it proposes the nearest name in the table, if one is similar."""
    shown = name[:64]
    near = difflib.get_close_matches(shown, table, n=1)
    fix = f"Did you mean {near[0]}? Otherwise remove it." if near else "Remove it."
    return InvalidArgument("UNKNOWN_FIELD", f"The request has an unknown field {shown!r}.", fix, param=shown)


def _type_name(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "null")


def json_text(name: str, value: Any) -> str:
    """Return a value that was parsed from JSON as JSON text. Raises InvalidArgument if it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise InvalidArgument("JSON_TOO_DEEP", f"{name} is nested too deeply.", "Flatten it.", param=name) from None
