"""The constraint of an answer in the client's form. A tokenizer compiles it; see quire_common.structured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire_common.structured.constraint import CONSTRAINT_PARAM

if TYPE_CHECKING:
    from quire_common.errors import QuireError

PROMPT_ENDS: Final = ("unknown", "thinking", "answering")
"""Names of a quire.v1.PromptEnd, by number."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint such as a JSON schema or a regular expression. `kind` and `text` have the meanings of
    quire.v1.Constraint. `param` is the name of the client's field, for errors."""

    kind: str
    text: str = ""
    strict: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""
    prompt_end: str = ""
    """One of PROMPT_ENDS if the prompt is a chat, whose answer may begin with reasoning; empty for other prompts."""
    param: str = CONSTRAINT_PARAM


@dataclass(frozen=True, slots=True)
class RequiredTools:
    """The tools that an answer may or must call. With `required`, the answer must have a call; otherwise only the
    arguments of its calls must follow their schemas. `name`: the only tool that may be called; empty: any tool."""

    tools_json: str
    required: bool = False
    name: str = ""
    parallel: bool = True
    param: str = "tools"


AnswerStructure = StructuredOutput | RequiredTools


def naming_field(error: QuireError, structure: AnswerStructure) -> QuireError:
    """Return the error of a tokenizer or engine about a constraint, with `param` set to the client's field."""
    return type(error)(error.code, error.message, error.fix, param=structure.param, retry_after_s=error.retry_after_s)
