"""What one message of a scheduler says, as plain values. The codec makes it, the reducer applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.credit.prompt_logprobs import PromptLogprobs
    from quire_common.errors import QuireError
    from quire_common.ticket import Ticket
    from quire_router.sequences.delta import HopTiming
    from quire_router.sequences.kv_route import PulledPages


class Admitted(NamedTuple):
    """The worker has begun with an attempt. `ticket`: how to have the pages that it computes."""

    handle: int
    attempt: int
    cached_tokens: int
    ticket: Ticket | None


class Finished(NamedTuple):
    """The parts of a message that belong to a sequence's last row."""

    handle: int
    cached_tokens: int
    timings: tuple[HopTiming, ...]
    stop_token_id: int | None


class Failed(NamedTuple):
    """The scheduler has let go of it."""

    handle: int
    error: QuireError


class Pulled(NamedTuple):
    """A decode side needs its ticket no more. `near`: the pages came from its own host."""

    handle: int
    found: PulledPages
    near: bool


class Prefilled(NamedTuple):
    """A prefill side has done its part, and has let go of it."""

    handle: int
    timings: tuple[HopTiming, ...]


@dataclass(slots=True)
class StepRows:
    """New tokens of one engine step: its columns as they came, and those that are read here as lists."""

    handle: bytes
    count: bytes
    token: bytes
    finish: bytes
    handles: list[int]
    counts: list[int]
    entries: list[tuple[int, bytes]]
    """Packed logprob entries with their handles, in the order of the tokens; where logprobs were asked for."""


@dataclass(slots=True)
class SessionStep:
    """In the order in which it is applied: what belongs to an end comes before the last row. `prefills` are tokens and
    microseconds of prompts that were computed."""

    admitted: Sequence[Admitted]
    prompt_logprobs: Sequence[PromptLogprobs]
    finished: Sequence[Finished]
    rows: StepRows | None
    failed: Sequence[Failed]
    pulled: Sequence[Pulled]
    prefills: Sequence[tuple[int, int]]
    prefilled: Sequence[Prefilled]
