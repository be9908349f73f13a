"""`parse_json` parses the JSON of a request within limits. `canonical_json` writes JSON as canonical text has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire_tokenizer.grammar.grammar_source import MAX_DEPTH, bad_grammar, too_large


def parse_json(text: str, what: str) -> Any:
    """Parse JSON. Raises GrammarRefused if it is invalid (NaN and Infinity included), or nested too deeply. `what`: its
    name in the error."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise _too_deep(what) from error
    except ValueError as error:
        raise bad_grammar(f"The {what} is no JSON: {error}.", "Send JSON.") from error
    check_depth(value, what)
    return value


def check_depth(value: Any, what: str) -> None:
    """Raise GrammarRefused if any value lies within more than MAX_DEPTH lists and objects. `what` is the value's name
    in the error."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise _too_deep(what)
        level = [inner for each in level for inner in children(each)]
        depth += 1


def children(value: Any) -> Iterator[Any]:
    """Yield the elements of a list, or the values of an object; nothing for any other value."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def canonical_json(value: Any) -> str:
    """Write JSON without whitespace or escapes. Members keep their order, since properties of answers have it too."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _too_deep(what: str) -> Exception:
    return too_large(f"The {what} has more than {MAX_DEPTH} lists and objects within one another.", "Flatten it.")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")
