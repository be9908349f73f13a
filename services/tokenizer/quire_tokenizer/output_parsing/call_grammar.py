"""The parts of the grammar of a family's tool calls. Each family's file writes it beside its parser: what the
grammar allows, the parser reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class GrammarWriter(Protocol):
    """Writes expressions of one grammar."""

    def add_rule(self, name: str, expression: str) -> str:
        """Add a rule. Returns what refers to it."""

    def literal(self, text: str) -> str:
        """Return the expression of a text, markers included."""

    def until(self, end: str) -> str:
        """Return the expression of the shortest text that ends with `end`."""

    def add_schema(self, schema: dict[str, Any]) -> str:
        """Return the expression of JSON that follows a schema."""

    def is_token(self, text: str) -> bool:
        """Whether a text is one token of the vocabulary."""


class ToolFunction(NamedTuple):
    """A tool that may be called. `parameters` is the schema of its arguments, an object, with options for the
    grammar."""

    name: str
    parameters: dict[str, Any]


class WantedCalls(NamedTuple):
    """The tools that may be called, and whether there may be more than one call."""

    tools: Sequence[ToolFunction]
    parallel: bool


class CallGrammar(NamedTuple):
    """The form of calls. `begin`: the text that says that calls follow; `rest`: the expression of what comes behind
    it. `between`: the text between two of these; None: there is only one, which holds all calls."""

    begin: str
    rest: str
    between: str | None = None


def any_of(writer: GrammarWriter, expressions: Iterable[str]) -> str:
    """Return the expression of one of these."""
    found = list(expressions)
    return found[0] if len(found) == 1 else writer.add_rule("any_of", " | ".join(found))


def list_of(writer: GrammarWriter, item: str, separator: str, *, parallel: bool) -> str:
    """Return the expression of one item or, with `parallel`, of several."""
    if not parallel:
        return item
    between = f"{writer.literal(separator)} " if separator else ""
    return writer.add_rule("list", f"{item} ({between}{item})*")


def part_of(root: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return a schema within another as one of its own, in which references are those of the other."""
    kept = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    return {**(schema if isinstance(schema, dict) else {}), **kept}
