"""The parts with which a family's file writes the grammar of its tool calls. The grammar is in the same file as the
family's parser, so that the parser can read everything that the grammar allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class GrammarWriter(Protocol):
    """Writes expressions of one grammar. See LarkGrammar."""

    def add_rule(self, name: str, expression: str) -> str:
        """Add a rule. Returns an expression for it."""

    def literal(self, text: str) -> str:
        """Return the expression for a text, which may contain markers."""

    def until(self, end: str) -> str:
        """Return the expression for the shortest text that ends with `end`."""

    def add_schema(self, schema: dict[str, Any]) -> str:
        """Add a JSON schema. Returns an expression for it."""

    def is_token(self, text: str) -> bool:
        """Whether a text is one token of the vocabulary."""


class ToolFunction(NamedTuple):
    """A tool that may be called. `parameters` is the prepared schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    properties: dict[str, Any]
    """The schemas of single arguments by their names. If the tool may have any arguments, these are the names that it
    declares, with empty schemas."""


class WantedCalls(NamedTuple):
    """The tools that may be called, and whether there may be more than one call."""

    tools: Sequence[ToolFunction]
    parallel: bool


class CallGrammar(NamedTuple):
    """The grammar of a block of tool calls."""

    begin: str
    """The text with which a block starts."""
    rest: str
    """The expression of the block after `begin`."""
    between: str | None = None
    """The text between two blocks; None: one block has all calls."""


def any_of(writer: GrammarWriter, expressions: Iterable[str]) -> str:
    """Return the expression for any one of these."""
    found = list(expressions)
    return found[0] if len(found) == 1 else writer.add_rule("any_of", " | ".join(found))


def list_of(writer: GrammarWriter, item: str, separator: str, *, parallel: bool) -> str:
    """Return the expression for one item or, with `parallel`, add a rule for a list of one or more items with the
    separator between them. `item` is an expression; `separator` is plain text, and may be empty."""
    if not parallel:
        return item
    between = f"{writer.literal(separator)} " if separator else ""
    return writer.add_rule("list", f"{item} ({between}{item})*")


def part_of(root: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return a part of a schema as a schema of its own, with the definitions to which it may refer and the root's
    options for llguidance."""
    kept = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    return {**(schema if isinstance(schema, dict) else {}), **kept}
