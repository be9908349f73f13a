"""Delta and other plain values of an answer, and the names of finish reasons. The front makes its formats of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.finish import FinishReason, PartKind

if TYPE_CHECKING:
    from collections.abc import Sequence

FINISH_NAMES = {reason.value: reason.name.lower() for reason in FinishReason if reason}
# Plain integers, since each step's rows are compared with them.
STOP, LENGTH = FinishReason.STOP.value, FinishReason.LENGTH.value
ERROR, REPETITION = FinishReason.ERROR.value, FinishReason.REPETITION.value


@dataclass(slots=True)
class LogprobEntry:
    """The logprob of one token, and its alternatives by id. The alternatives are arrays, because an answer may have
    many. The class is not frozen, because the hot path makes an object for each token."""

    token_id: int
    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of an answer's text. `kind` is a PartKind; `call` is the index of the tool call, -1 for none."""

    kind: int
    call: int
    text: str

    @property
    def block(self) -> tuple[int, int]:
        """The block of the answer that the part belongs to: a tool's name and the arguments of its call are one."""
        return PartKind.TOOL_ARGUMENTS if self.kind == PartKind.TOOL_NAME else self.kind, self.call


@dataclass(slots=True)
class Delta:
    """The output of a sequence since its last delta. `token_ids` are the int32 bytes of `tokens` tokens, if the client
    wants ids. `finish` is a FinishReason; 0 while the sequence runs.

    If the client asks for logprobs, `entries` has one entry per token, and `offsets` has the number of output
    characters after each token. `parts` are the parts of `text`; None: all text is content. Not frozen, because a delta
    is made for every token on the hot path.
    """

    index: int
    text: str
    tokens: int
    token_ids: bytes
    entries: list[LogprobEntry]
    offsets: list[int]
    finish: int
    stop_reason: str | int | None
    parts: list[TextPart] | None = None


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Microseconds that one phase of a service took, over `count` operations. `instance` is the replica that has
    reported the time; it may be empty."""

    service: str
    phase: str
    us: int
    count: int = 1
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole job: the prompt counts once, however many sequences it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
