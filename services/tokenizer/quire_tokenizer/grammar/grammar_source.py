"""GrammarSource: the structure that an answer must match, as a request describes it. GrammarRefused: the error for a
bad source."""

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
    """The source of a grammar: a schema, a regular expression, tools or the like, with options of a request."""

    kind: str
    """One of KINDS, or TOOLS."""
    text: str = ""
    strict: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""
    reasoning: bool = False
    """Whether the answer may reason first, if the model reasons."""
    prompt_end: PromptEnd = "unknown"
    required: bool = False
    """Whether the answer must consist of tool calls alone."""
    tool: str = ""
    """The name of the only tool that may be called; empty: all tools may be called."""
    parallel: bool = False
    """Whether the answer may have more than one call."""

    def job(self) -> dict[str, Any]:
        """Return the fields as JSON, for a child process."""
        return asdict(self)

    def for_tool(self, *, strict: bool) -> GrammarSource:
        """Return the source for the arguments of one tool, which have their own `strict`."""
        return replace(self, strict=strict)

    def digest(self) -> bytes:
        """Return a digest of all fields. Sources with the same digest have the same grammar."""
        return hashlib.sha256(json.dumps(self.job()).encode()).digest()


class GrammarRefused(InvalidArgument):
    """The source is wrong or too large, cannot be enforced, takes too long or breaks the process that compiles it.
    `reason` is the label of a metric."""

    def __init__(self, code: str, message: str, fix: str, *, param: str = "", reason: str = "invalid") -> None:
        super().__init__(code, message, fix, param=param)
        self.reason = reason


def bad_grammar(message: str, fix: str, param: str = "") -> GrammarRefused:
    """Return the error for an invalid source."""
    return GrammarRefused("BAD_GRAMMAR", message, fix, param=param)


def too_large(message: str, fix: str, param: str = "") -> GrammarRefused:
    """Return the error for a source that exceeds a limit."""
    return GrammarRefused("GRAMMAR_TOO_LARGE", message, fix, param=param, reason="too_large")
