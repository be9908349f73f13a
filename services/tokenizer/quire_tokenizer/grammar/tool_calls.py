"""`tools_expression` writes the grammar of answers with tool calls. Calls may be required or optional; arguments follow
the tool's schema.

Each family's file in `output_parsing/` writes the calls in the family's own format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from quire_tokenizer.grammar.grammar_source import bad_grammar
from quire_tokenizer.grammar.json_schema import prepare_schema
from quire_tokenizer.grammar.json_text import parse_json
from quire_tokenizer.grammar.lark_grammar import TEXT
from quire_tokenizer.grammar.reasoning_prefix import harmony_reasoning
from quire_tokenizer.output_parsing import families, harmony
from quire_tokenizer.output_parsing.call_grammar import CallGrammar, ToolFunction, WantedCalls

if TYPE_CHECKING:
    from quire_tokenizer.grammar.grammar_source import GrammarSource
    from quire_tokenizer.grammar.lark_grammar import LarkGrammar

_ANY_ARGUMENTS: Final = {"type": "object"}
# An answer without a call, for families whose calls have no start marker: it does not start with a bracket.
_NO_CALL: Final = r"/([^{\[ \n](?s:.*))?/"


def tools_expression(source: GrammarSource, parser: str, grammar: LarkGrammar, warnings: list[str]) -> str:
    """Return the expression of an answer with tool calls, in the format of this tool parser, without the reasoning
    (Harmony's is included). If calls are required, the answer is calls alone; otherwise free text may come instead of a
    call (for a family without a start marker, only text that does not begin with `[`, `{`, a space or a line break). If
    the family's calls have a start marker, free text may then come before a call too, and after it if `parallel` allows
    several blocks of calls; not in Harmony. `parallel` of the source allows several calls, except in Harmony. Raises
    GrammarRefused for an unknown parser, a bad schema, or if there is no tool. What is not enforced is added to
    `warnings`."""
    family = families.TOOL_FAMILIES.get(parser)
    if family is None and parser != families.HARMONY:
        raise bad_grammar(
            "Quire does not know the format of this model's tool calls.",
            "Start the tokenizer with --tool-call-parser.",
            "tools",
        )
    wanted = WantedCalls(_tools(source, warnings), source.parallel)
    if family is None:
        return _harmony(harmony.write_calls(grammar, wanted), grammar, required=source.required)
    calls = family.write_calls(grammar, wanted)
    between = calls.between if source.parallel else None
    if source.required or not calls.begin:
        call = grammar.add_rule("call", f"{grammar.literal(calls.begin)} {calls.rest}" if calls.begin else calls.rest)
        whole = call if between is None else f"{call} ({grammar.literal(between)} {call})*"
        return whole if source.required else f"({whole} | {_NO_CALL})"
    lazy = grammar.add_rule("triggered", f"{grammar.until(calls.begin)} {calls.rest}")
    return f"({lazy} | {TEXT})" if between is None else f"{lazy}* {TEXT}"


def _tools(source: GrammarSource, warnings: list[str]) -> list[ToolFunction]:
    """Return the tools that may be called (only `source.tool` if that is named; tools without a name, or whose function
    is no object, are skipped), each with a prepared schema: the tool's own `parameters` if it has some and the tool is
    strict or a call is required, otherwise a schema of any object. Adds to `warnings` the parts of schemas that are not
    enforced. Raises GrammarRefused if there is no tool, or a schema is bad."""
    given = parse_json(source.text, "list of tools")
    found: list[ToolFunction] = []
    for tool in given if isinstance(given, list) else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or (source.tool and name != source.tool):
            continue
        strict = bool(function.get("strict"))
        declared = function.get("parameters")
        schema = (declared if strict or source.required else None) or _ANY_ARGUMENTS
        said = list[str]()
        prepared = prepare_schema(schema, source.for_tool(strict=strict), said)
        prepared.setdefault("type", "object")
        properties = _properties(prepared) or {key: {} for key in _properties(declared)}
        found.append(ToolFunction(name, prepared, properties))
        warnings += [f"{name}: {each}" for each in said]
    if not found:
        raise bad_grammar("There is no tool to call.", "Send tools, and name one of them.", "tools")
    return found


def _properties(schema: Any) -> dict[str, Any]:
    """Return the properties of a schema; none if they are no object."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _harmony(calls: CallGrammar, grammar: LarkGrammar, *, required: bool) -> str:
    """Return the expression of an answer in Harmony's format: reasoning, then a call. Unless calls are `required`, a
    final message of free text may stand in place of the call."""
    call = f"{grammar.literal(calls.begin)} {calls.rest}"
    answer = call if required else f"({call} | {grammar.literal('<|channel|>final<|message|>')} {TEXT})"
    return f"{harmony_reasoning(grammar)} {answer}"
