"""The constraint of an answer, as a client writes it. A tokenizer compiles it; see quire_common.structured."""

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
    """`kind` and `text` are those of quire.v1.Constraint; `param`: the client's field, for errors."""

    kind: str
    text: str = ""
    strict: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""
    prompt_end: str = ""
    """One of PROMPT_ENDS: the prompt is a chat, which ends so, and the answer may reason first."""
    param: str = CONSTRAINT_PARAM


@dataclass(frozen=True, slots=True)
class RequiredTools:
    """Calls that an answer must have, or whose arguments must follow their schemas. `name`: the only one; empty:
    any."""

    tools_json: str
    required: bool = False
    name: str = ""
    parallel: bool = True
    param: str = "tools"


AnswerStructure = StructuredOutput | RequiredTools


def naming_field(error: QuireError, structure: AnswerStructure) -> QuireError:
    """Return the error of a tokenizer or engine about a constraint, with the field in which the client sent it."""
    return type(error)(error.code, error.message, error.fix, param=structure.param, retry_after_s=error.retry_after_s)
