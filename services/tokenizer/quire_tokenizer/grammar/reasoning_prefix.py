"""The free part of a chat's answer before the constrained one: reasoning, until its end marker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing import families

if TYPE_CHECKING:
    from quire_tokenizer.grammar.lark_grammar import LarkGrammar
    from quire_tokenizer.output_parsing.answer_parsers import PromptEnd

# Parsers pass over whitespace behind reasoning.
_GAP = r"/[ \n]{0,3}/"


@dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """The names of one model's parsers, empty for none."""

    reasoning_parser: str
    tool_parser: str

    @property
    def is_harmony(self) -> bool:
        """Whether answers are Harmony's messages, each in a channel."""
        return self.reasoning_parser == families.HARMONY_REASONING or self.tool_parser == families.HARMONY

    def expression(self, grammar: LarkGrammar, prompt_end: PromptEnd) -> str:
        """Return the expression of what precedes the constrained part; empty where nothing does."""
        if self.is_harmony:
            return f"{harmony_reasoning(grammar)} {grammar.literal('<|channel|>final<|message|>')}"
        family = families.REASONING_FAMILIES.get(self.reasoning_parser)
        if family is None or prompt_end == "answering":
            return ""
        start, thinking = grammar.literal(family.markers.start), f"{grammar.until(family.markers.end)} {_GAP}"
        if prompt_end == "thinking":
            return thinking
        return f"({start})? {thinking}" if family.assumed else f"({start} {thinking})?"


def harmony_reasoning(grammar: LarkGrammar) -> str:
    """Return the expression of Harmony's messages before the final one."""
    thoughts = f"{grammar.literal('<|channel|>analysis<|message|>')} {grammar.until('<|end|>')}"
    analysis = grammar.add_rule("analysis", thoughts)
    return f"({analysis} {grammar.literal('<|start|>assistant')})*"
