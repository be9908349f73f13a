"""ReasoningPrefix: writes the grammar of the reasoning in front of a constrained answer. The reasoning itself is free
text up to its end marker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_tokenizer.output_parsing import families

if TYPE_CHECKING:
    from quire_tokenizer.grammar.lark_grammar import LarkGrammar
    from quire_tokenizer.output_parsing.answer_parsers import PromptEnd

# Whitespace after the reasoning, which parsers skip.
_GAP = r"/[ \n]{0,3}/"


@dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """The names of one model's parsers; empty: it has none."""

    reasoning_parser: str
    tool_parser: str

    @property
    def is_harmony(self) -> bool:
        """Whether the model writes messages of the Harmony format, each in a channel."""
        return self.reasoning_parser == families.HARMONY_REASONING or self.tool_parser == families.HARMONY

    def expression(self, grammar: LarkGrammar, prompt_end: PromptEnd) -> str:
        """Return the expression of the reasoning before the answer; empty if the model has none, or the prompt ends
        after it. If the prompt ends within reasoning, the expression is the rest up to the end marker; up to three
        spaces or line breaks may follow the marker. If `prompt_end` is "unknown", the whole reasoning is optional; for
        a family that is assumed to reason, only its start marker is optional. For Harmony, `prompt_end` does not
        matter, and the expression ends with the header of the final message."""
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
    """Return the expression of the analysis messages before Harmony's final message."""
    thoughts = f"{grammar.literal('<|channel|>analysis<|message|>')} {grammar.until('<|end|>')}"
    analysis = grammar.add_rule("analysis", thoughts)
    return f"({analysis} {grammar.literal('<|start|>assistant')})*"
