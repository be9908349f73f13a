"""One request's life: a state machine with asserted transitions, and what is known of the request meanwhile."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_scheduler.invariant import require
from quire_scheduler.timing import Timing

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext, Sequence


class State(enum.Enum):
    """Where a request is in its life."""

    # In the queue policy's hands, without a seat in the order yet.
    QUEUED = enum.auto()
    # The kvstore is asked what it holds of the prompt.
    LOOKUP = enum.auto()
    # Has its seat; waits for a slot and pages.
    READY = enum.auto()
    # Holds a slot.
    STARTED = enum.auto()
    # Lost its slot; tokens of steps already launched may still come.
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.LOOKUP, State.READY, State.FINISHED}),
    State.LOOKUP: frozenset({State.READY, State.FINISHED}),
    State.READY: frozenset({State.LOOKUP, State.STARTED, State.FINISHED}),
    State.STARTED: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.READY, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """A request of a session. `uid` grows with arrival and names it within one core; compared by identity."""

    uid: int
    session: int
    handle: int
    context: RequestContext
    sequence: Sequence
    timing: Timing
    state: State = State.QUEUED
    # Lower goes first; the seat in the order, kept over preemption.
    order_key: int = 0
    # All output ids, those of earlier attempts first; while it holds a slot, the latest are in the slot table.
    output: array[int] = field(default_factory=lambda: array("i"))
    # Identities of the prompt's full pages.
    hashes: tuple[bytes, ...] = ()
    # Device pages by group.
    tables: tuple[list[int], ...] = ()
    slot: int = -1
    # Tokens whose KV was, or is being, loaded instead of computed.
    cached_tokens: int = 0
    looked_up: bool = False
    preemptions: int = 0
    pages_lost: int = 0
    # Errors of which it is not known whether they were this request's.
    doubts: int = 0
    admitted: bool = False

    @classmethod
    def new(
        cls, uid: int, session: int, handle: int, context: RequestContext, sequence: Sequence, now: float
    ) -> Request:
        """A request that has just arrived."""
        output = array("i", sequence.output_ids.astype(np.int32).tobytes())
        return cls(uid, session, handle, context, sequence, Timing(now), output=output)

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.sequence.prompt_ids)

    @property
    def known_len(self) -> int:
        """Prompt and output tokens."""
        return len(self.sequence.prompt_ids) + len(self.output)

    @property
    def waits(self) -> bool:
        """Whether it holds a place among the waiting."""
        return self.state in (State.QUEUED, State.LOOKUP, State.READY)

    def to(self, state: State) -> None:
        """Move on; only the transitions drawn above exist."""
        require(state in _NEXT[self.state], "a request cannot change its state so")
        self.state = state

    def resumed_sequence(self) -> Sequence:
        """The sequence as a Start must carry it: with every token emitted so far."""
        if len(self.output) == len(self.sequence.output_ids):
            return self.sequence
        return replace(self.sequence, output_ids=np.array(self.output, np.int32))
