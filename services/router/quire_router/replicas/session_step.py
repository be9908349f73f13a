"""One message of a scheduler as plain values. session_codec.py makes these values, and session_reducer.py applies
them."""

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
    """The worker has begun to run an attempt. With `ticket`, another engine can pull the pages that the worker
    computes."""

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
    """The scheduler has dropped the sequence or reservation because of an error."""

    handle: int
    error: QuireError


class Pulled(NamedTuple):
    """A decode side has ended its pull, and does not need its ticket any more. `near`: the pages came from the same
    host."""

    handle: int
    found: PulledPages
    near: bool


class Prefilled(NamedTuple):
    """A prefill side has computed the prompt, and has dropped the sequence."""

    handle: int
    timings: tuple[HopTiming, ...]


@dataclass(slots=True)
class StepRows:
    """The new tokens of one engine step. `handle`, `count`, `token` and `finish` are the columns of the message;
    `handles` and `counts` are two of them as lists."""

    handle: bytes
    count: bytes
    token: bytes
    finish: bytes
    handles: list[int]
    counts: list[int]
    entries: list[tuple[int, bytes]]
    """(handle, packed logprob entry) for each token whose sequence asks for logprobs, in the order of the tokens."""


@dataclass(slots=True)
class SessionStep:
    """All parts of one message. The fields are in the order in which they are applied, so that the data about a
    sequence's end come before its last row. `prefills` has, for each computed prompt, its tokens and microseconds."""

    admitted: Sequence[Admitted]
    prompt_logprobs: Sequence[PromptLogprobs]
    finished: Sequence[Finished]
    rows: StepRows | None
    failed: Sequence[Failed]
    pulled: Sequence[Pulled]
    prefills: Sequence[tuple[int, int]]
    prefilled: Sequence[Prefilled]
