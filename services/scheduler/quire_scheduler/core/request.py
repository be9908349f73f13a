"""One request's life: a state machine with asserted transitions, its tokens, and what it holds.

A request's pull, transfer, handover, lookups and offers to the kvstore live with their owners, by the request's `uid`.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import require
from quire_scheduler.core.timing import Timing
from quire_scheduler.disaggregation.handover import NO_TRANSFER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.sequence import RequestContext, Sequence
    from quire_common.ticket import KvTransfer


class State(enum.Enum):
    """Where a request is in its life."""

    # In the queue policy, without an order key yet.
    QUEUED = enum.auto()
    # The kvstore is asked what it holds of the prompt.
    LOOKUP = enum.auto()
    # Has its order key; waits for a slot and pages.
    READY = enum.auto()
    # Waits for a handover, or for room among those that hold pages without a slot, and is waited for by nobody.
    ASIDE = enum.auto()
    # Holds pages and no slot: what they are to hold is on its way, or tokens are.
    PULLING = enum.auto()
    # Holds pages that will not be filled further; waits for a slot.
    PULLED = enum.auto()
    # Holds a slot.
    STARTED = enum.auto()
    # Lost its slot; tokens of steps already launched may still come.
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


_NEXT: dict[State, tuple[State, ...]] = {
    State.QUEUED: (State.LOOKUP, State.READY, State.ASIDE, State.FINISHED),
    State.LOOKUP: (State.READY, State.FINISHED),
    State.READY: (State.LOOKUP, State.STARTED, State.ASIDE, State.PULLING, State.FINISHED),
    State.ASIDE: (State.QUEUED, State.READY, State.FINISHED),
    State.PULLING: (State.PULLED, State.ASIDE, State.FINISHED),
    State.PULLED: (State.STARTED, State.ASIDE, State.FINISHED),
    State.STARTED: (State.PREEMPTED, State.FINISHED),
    State.PREEMPTED: (State.READY, State.FINISHED),
    State.FINISHED: (),
}


_WAITING = (State.QUEUED, State.LOOKUP, State.READY, State.ASIDE, State.PULLING, State.PULLED)


@dataclass(slots=True, eq=False)
class Request:
    """A request of a session. `uid` grows with arrival and names it within one core; compared by identity."""

    uid: int
    session: int
    handle: int
    context: RequestContext
    sequence: Sequence
    timing: Timing
    transfer: KvTransfer = NO_TRANSFER
    # Leading tokens whose pages anybody had when it came, as its router believed; None: it did not say.
    held_tokens: int | None = None
    state: State = State.QUEUED
    # Lower goes first; kept over preemption.
    order_key: int = 0
    # All output ids, those of earlier attempts first; while it holds a slot, the latest are in the slot table.
    output: array[int] = field(default_factory=lambda: array("i"))
    # Identities of the full pages of prompt and output, as far as they were asked for.
    hashes: list[bytes] = field(default_factory=list)
    # Device pages by group.
    tables: tuple[list[int], ...] = ()
    slot: int = -1
    # Tokens whose KV this run need not compute: it was on the device, another fills it, or it is loaded.
    cached_tokens: int = 0
    # The same as it was thought to be at the start.
    expected_tokens: int = 0
    # Of these, those found on the device; the others come from the kvstore.
    local_tokens: int = 0
    # Prompt tokens that no run so far has computed.
    saved_tokens: int = 0
    preemptions: int = 0
    pages_lost: int = 0
    # Errors of which it is not known whether they were this request's.
    doubts: int = 0
    admitted: bool = False
    # Its prompt is among the tokens counted by source.
    counted: bool = False

    @classmethod
    def new(
        cls,
        uid: int,
        session: int,
        handle: int,
        context: RequestContext,
        sequence: Sequence,
        now: float,
        transfer: KvTransfer = NO_TRANSFER,
        held_tokens: int | None = None,
    ) -> Request:
        """Make a request that has just arrived; its output begins with the tokens of earlier attempts."""
        output = array("i", np.asarray(sequence.output_ids, np.int32).tobytes())
        return cls(uid, session, handle, context, sequence, Timing(now), transfer, held_tokens, output=output)

    @property
    def prefill_only(self) -> bool:
        """It is over when it has drawn a token."""
        return self.transfer.prefill_only

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.sequence.prompt_ids)

    @property
    def known_len(self) -> int:
        """Prompt and output tokens."""
        return len(self.sequence.prompt_ids) + len(self.output)

    def ids(self, first: int, end: int) -> NDArray[np.int32]:
        """Return the token ids at positions `first` to `end` (exclusive). Position 0 is the prompt's first token; the
        output follows the prompt."""
        prompt, length = self.sequence.prompt_ids, self.prompt_len
        if end <= length:
            return prompt[first:end]
        output = np.array(self.output[max(first - length, 0) : end - length], np.int32)
        return np.concatenate([prompt[first:], output]) if first < length else output

    def take_order_key(self, order_key: int) -> None:
        """The queue policy has fixed the request's place."""
        self.order_key = order_key

    def take_slot(self, slot: int) -> None:
        """The request holds the slot."""
        require(self.slot < 0, "a request takes a second slot")
        self.slot = slot

    def leave_slot(self) -> None:
        """The request holds no slot."""
        self.slot = -1

    def hold_pages(self, tables: tuple[list[int], ...]) -> None:
        """The request holds these pages, by group."""
        self.tables = tables

    def give_up_pages(self) -> None:
        """The request holds no pages."""
        self.tables = ()

    def took_pages(self, local_tokens: int, cached_tokens: int, expected_tokens: int) -> None:
        """Note that a run begins: how many leading tokens have their KV on the device (`local_tokens`), there or on its
        way (`cached_tokens`), and how many of them loads and other requests are to bring (`expected_tokens`). Prompt
        tokens count as saved that no run computes."""
        saved = min(cached_tokens, self.prompt_len)
        self.saved_tokens = min(self.saved_tokens, saved) if self.admitted else saved
        self.local_tokens, self.cached_tokens = local_tokens, cached_tokens
        self.expected_tokens = expected_tokens

    def lost_pages(self, cached_tokens: int) -> None:
        """Less was loaded than this run was started on."""
        self.cached_tokens = min(self.cached_tokens, cached_tokens)
        self.saved_tokens = min(self.saved_tokens, cached_tokens)

    def admit(self) -> None:
        """The request has taken its first slot."""
        self.admitted = True

    def preempt(self, now: float, *, counts: bool) -> None:
        """The request has lost its slot; `counts` says whether that is a preemption, for lack of pages."""
        self.move_to(State.PREEMPTED)
        self.timing.stopped(now, len(self.output))
        if counts:
            self.preemptions += 1
            self.timing.preempted(now)

    def count_lost_pages(self) -> int:
        """Count that the worker lost the request's pages. Returns how often it has."""
        self.pages_lost += 1
        return self.pages_lost

    def count_doubt(self) -> int:
        """Count an error that may be the request's. Returns how many such came."""
        self.doubts += 1
        return self.doubts

    def count_prompt(self) -> bool:
        """Mark the prompt as counted. Returns whether it was not before."""
        counted, self.counted = self.counted, True
        return not counted

    @property
    def waits(self) -> bool:
        """Whether it holds a place among the waiting."""
        return self.state in _WAITING

    @property
    def holds(self) -> bool:
        """Whether it has pages without a slot."""
        return self.state in (State.PULLING, State.PULLED)

    def move_to(self, state: State) -> None:
        """Move on; only the transitions drawn above exist."""
        require(state in _NEXT[self.state], "a request cannot change its state so")
        self.state = state

    def resumed_sequence(self) -> Sequence:
        """The sequence as a Start must carry it: with every token emitted so far."""
        if len(self.output) == len(self.sequence.output_ids):
            return self.sequence
        return replace(self.sequence, output_ids=np.array(self.output, np.int32))
