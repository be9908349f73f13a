"""`canonical_text` writes the grammar of a source, in the form that tokenizers send and workers compile.

Equal sources have the same canonical text, for models with the same output format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire_common.structured.constraint import MAX_GRAMMAR_BYTES
from quire_tokenizer.grammar.grammar_source import MAX_CHOICES, TOOLS, bad_grammar, too_large
from quire_tokenizer.grammar.json_schema import prepare_schema
from quire_tokenizer.grammar.json_text import parse_json
from quire_tokenizer.grammar.lark_grammar import LarkGrammar, quoted
from quire_tokenizer.grammar.reasoning_prefix import ReasoningPrefix
from quire_tokenizer.grammar.structural_tags import StructuralTags, lark_of_grammar
from quire_tokenizer.grammar.tool_calls import tools_expression

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_tokenizer.grammar.grammar_source import GrammarSource

_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ModelOutputFormat:
    """The properties of a model's answers on which grammars depend: its special tokens, and how it writes tool calls
    and reasoning."""

    added: Mapping[str, int]
    """The ids of the tokens that were added to the vocabulary, by their text."""
    tool_parser: str = ""
    reasoning_parser: str = ""


def canonical_text(source: GrammarSource, output_format: ModelOutputFormat, warnings: list[str]) -> str:
    """Return the grammar of a source as canonical text: first the reasoning, if the source allows it and the model
    reasons, then the constrained answer. For tools, Harmony's tool parser has the reasoning in any case, and Harmony's
    reasoning parser beside another tool parser has none. Adds to `warnings` what the grammar does not enforce. Raises
    GrammarRefused for a bad source, or a grammar of more than MAX_GRAMMAR_BYTES."""
    grammar = LarkGrammar(output_format.added)
    prefix, reasoning = ReasoningPrefix(output_format.reasoning_parser, output_format.tool_parser), ""
    if source.kind == TOOLS:
        body = tools_expression(source, output_format.tool_parser, grammar, warnings)
    else:
        body = _body(source, grammar, warnings)
    if source.reasoning and not (source.kind == TOOLS and prefix.is_harmony):
        reasoning = prefix.expression(grammar, source.prompt_end)
    text = grammar.text(f"{reasoning} {body}" if reasoning else body)
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise too_large(
            f"The grammar has {size} bytes, at most {MAX_GRAMMAR_BYTES} are possible.", "Send a smaller one."
        )
    return text


def _body(source: GrammarSource, grammar: LarkGrammar, warnings: list[str]) -> str:
    """Add the parts of a constraint to `grammar`, and return the expression of the answer without its reasoning. The
    constraint is of any kind but TOOLS. Adds to `warnings` what is not enforced. Raises GrammarRefused for a bad source
    or an unknown kind."""
    if source.kind == "json_object":
        return grammar.add_schema(prepare_schema(_ANY_OBJECT, source, warnings))
    if source.kind == "json_schema":
        return grammar.add_schema(prepare_schema(parse_json(source.text, "schema"), source, warnings))
    if source.kind == "regex":
        return grammar.add_regex(source.text)
    if source.kind == "choice":
        # A terminal (in capitals), since the parser allows at most 2,000 alternatives, and the lexer more.
        return grammar.add_rule("CHOICE", _choice(source.text))
    if source.kind == "grammar":
        return grammar.add_lark(lark_of_grammar(source.text))
    if source.kind == "structural_tag":
        return StructuralTags(grammar, source, warnings).whole_expression(parse_json(source.text, "structural tag"))
    raise bad_grammar(f"There is no constraint of the kind {source.kind[:50]!r}.", "Use a kind of the contract.")


def _choice(text: str) -> str:
    """Return the texts of a JSON list as alternatives in Lark, each text once. Raises GrammarRefused for an empty list,
    for values that are not texts, and for more than MAX_CHOICES texts, where repeated ones count."""
    choices = parse_json(text, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise bad_grammar("choice is no list of texts, or an empty one.", "Send at least one text.")
    if len(choices) > MAX_CHOICES:
        raise too_large(f"There are {len(choices)} choices, at most {MAX_CHOICES} are possible.", "Send fewer.")
    return " | ".join(map(quoted, dict.fromkeys(choices)))
