"""GrammarSource: what an answer must match, as a request says it. GrammarRefused: why there is no grammar of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from quire_tokenizer.output_parsing.answer_parsers import PromptEnd

KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
TOOLS: Final = "tools"
MAX_DEPTH: Final = 100
MAX_CHOICES: Final = 4096


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """`kind`: one of KINDS, or TOOLS. `reasoning`: the answer may reason first, in the way of the model's family."""

    kind: str
    text: str = ""
    strict: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""
    reasoning: bool = False
    prompt_end: PromptEnd = "unknown"
    required: bool = False
    """Whether the answer must consist of calls of tools alone."""
    tool: str = ""
    """The one tool that may be called; empty: any."""
    parallel: bool = False
    """Whether the answer may have more than one call."""

    def job(self) -> dict[str, Any]:
        """Return the fields, as JSON has them."""
        return asdict(self)

    def for_tool(self, *, strict: bool) -> GrammarSource:
        """Return the source of the arguments of one tool."""
        return replace(self, strict=strict)

    def digest(self) -> bytes:
        """Name the source: equal sources have equal grammars."""
        return hashlib.sha256(json.dumps(self.job()).encode()).digest()


class GrammarRefused(InvalidArgument):
    """The source is wrong or too large. `reason`: few words, for a metric."""

    def __init__(self, code: str, message: str, fix: str, *, param: str = "", reason: str = "invalid") -> None:
        super().__init__(code, message, fix, param=param)
        self.reason = reason


def bad_grammar(message: str, fix: str, param: str = "") -> GrammarRefused:
    """Return the error for a source that is wrong in itself."""
    return GrammarRefused("BAD_GRAMMAR", message, fix, param=param)


def too_large(message: str, fix: str, param: str = "") -> GrammarRefused:
    """Return the error for a source that exceeds a bound."""
    return GrammarRefused("GRAMMAR_TOO_LARGE", message, fix, param=param, reason="too_large")
