"""Request: the life of one request as a state machine with checked transitions, its tokens, and the slot and pages that
it holds.

Records of a request's pull, transfer, handover, lookups and stores are kept by the modules that own them, by the
request's `uid`.
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
    """The state of a request."""

    # In the queue policy, without an order key yet.
    QUEUED = enum.auto()
    # The kvstore is asked what it holds of the prompt.
    LOOKUP = enum.auto()
    # Has its order key; waits for a slot and pages.
    READY = enum.auto()
    # Waits for a handover, or for room among the requests that hold pages without a slot. No other request waits for
    # it.
    ASIDE = enum.auto()
    # Holds pages but no slot; the content of the pages, or tokens, are on their way from another engine.
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
    """A request of a session. `uid` grows with arrival and identifies the request within one core. Requests are
    compared by identity."""

    uid: int
    session: int
    handle: int
    context: RequestContext
    sequence: Sequence
    timing: Timing
    # The number of prompt tokens, which never changes.
    prompt_len: int = field(init=False)
    transfer: KvTransfer = NO_TRANSFER
    # Number of leading tokens whose pages somebody had when the request came, as its router believed; None: the router
    # did not say.
    held_tokens: int | None = None
    state: State = State.QUEUED
    # Requests with a lower key start first. A preempted request keeps its key.
    order_key: int = 0
    # All output ids; those of earlier attempts come first. While the request holds a slot, the latest ids are in the
    # slot table.
    output: array[int] = field(default_factory=lambda: array("i"))
    # Hashes of the full pages of prompt and output, as far as they were asked for.
    hashes: list[bytes] = field(default_factory=list)
    # Device pages by group.
    tables: tuple[list[int], ...] = ()
    slot: int = -1
    # Number of tokens whose KV this run need not compute: it was on the device, another request computes it, or it is
    # loaded.
    cached_tokens: int = 0
    # The value of `cached_tokens` at the start of the run; a pulled page that is not full is left out.
    expected_tokens: int = 0
    # Number of cached tokens that were found on the device; the others come from the kvstore or another engine.
    local_tokens: int = 0
    # Number of prompt tokens that no run so far has computed.
    saved_tokens: int = 0
    preemptions: int = 0
    pages_lost: int = 0
    # Number of errors that may or may not have been this request's.
    ambiguous_errors: int = 0
    admitted: bool = False
    # Whether the prompt's tokens have been counted by the source of their KV.
    counted: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.sequence.prompt_ids)

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
        """Make a request that arrived at `now` and is QUEUED. Its output begins with the sequence's output ids, which
        are the tokens of earlier attempts. `held_tokens` is the number of leading tokens whose pages somebody has, as
        the router believes; None if unknown."""
        output = array("i", sequence.output_ids.tobytes())
        return cls(uid, session, handle, context, sequence, Timing(now), transfer, held_tokens, output=output)

    @property
    def prefill_only(self) -> bool:
        """Whether the request ends when it has sampled its first token."""
        return self.transfer.prefill_only

    @property
    def known_len(self) -> int:
        """The number of prompt and output tokens."""
        return self.prompt_len + len(self.output)

    def ids(self, first: int, end: int) -> NDArray[np.int32]:
        """Return the token ids at positions `first` to `end` (exclusive). Position 0 is the prompt's first token;
        the output follows the prompt. Tokens that are still in the slot table (see `SlotTable.settle_output`) are
        left out."""
        prompt, length = self.sequence.prompt_ids, self.prompt_len
        if end <= length:
            return prompt[first:end]
        output = np.array(self.output[max(first - length, 0) : end - length], np.int32)
        return np.concatenate([prompt[first:], output]) if first < length else output

    def take_order_key(self, order_key: int) -> None:
        """Set the request's order key, which the queue policy has decided."""
        self.order_key = order_key

    def take_slot(self, slot: int) -> None:
        """Note that the request holds the slot."""
        require(self.slot < 0, "a request takes a second slot")
        self.slot = slot

    def leave_slot(self) -> None:
        """Note that the request holds no slot."""
        self.slot = -1

    def hold_pages(self, tables: tuple[list[int], ...]) -> None:
        """Note that the request holds these pages, by KV group."""
        self.tables = tables

    def give_up_pages(self) -> None:
        """Note that the request holds no pages."""
        self.tables = ()

    def took_pages(self, local_tokens: int, cached_tokens: int, expected_tokens: int) -> None:
        """Note that a run begins. `local_tokens`: the number of leading tokens whose KV is on the device.
        `cached_tokens`: the number whose KV is on the device or on its way there. `expected_tokens`: the same, without
        a last page that is not full. Prompt tokens that no run has computed so far count as saved, so a later run can
        only reduce `saved_tokens`."""
        saved = min(cached_tokens, self.prompt_len)
        self.saved_tokens = min(self.saved_tokens, saved) if self.admitted else saved
        self.local_tokens, self.cached_tokens = local_tokens, cached_tokens
        self.expected_tokens = expected_tokens

    def lost_pages(self, cached_tokens: int) -> None:
        """Note that only the KV of the first `cached_tokens` tokens was loaded, fewer than this run was started on."""
        self.cached_tokens = min(self.cached_tokens, cached_tokens)
        self.saved_tokens = min(self.saved_tokens, cached_tokens)

    def admit(self) -> None:
        """Note that the request has taken its first slot."""
        self.admitted = True

    def preempt(self, now: float, *, counts: bool) -> None:
        """Set the state to PREEMPTED, and add the time in the slot to the request's timing. With `counts`, the
        number of preemptions grows and the time of this one is recorded."""
        self.move_to(State.PREEMPTED)
        self.timing.stopped(now, len(self.output))
        if counts:
            self.preemptions += 1
            self.timing.preempted(now)

    def count_lost_pages(self) -> int:
        """Count that the worker lost the request's pages. Returns how often that has happened."""
        self.pages_lost += 1
        return self.pages_lost

    def count_ambiguous_error(self) -> int:
        """Count an error that may be the request's. Returns the number of such errors."""
        self.ambiguous_errors += 1
        return self.ambiguous_errors

    def count_prompt(self) -> bool:
        """Mark the prompt as counted. Returns False if it was counted before."""
        counted, self.counted = self.counted, True
        return not counted

    @property
    def waits(self) -> bool:
        """Whether the request is in the pending queue."""
        return self.state in _WAITING

    @property
    def holds(self) -> bool:
        """Whether the request holds pages without a slot."""
        return self.state in (State.PULLING, State.PULLED)

    def move_to(self, state: State) -> None:
        """Change the state. Raises AssertionError for a transition that `_NEXT` does not list."""
        require(state in _NEXT[self.state], "a request cannot change its state so")
        self.state = state

    def resumed_sequence(self) -> Sequence:
        """Return the sequence for a Start: the request's sequence with all tokens emitted so far as its output ids."""
        if len(self.output) == len(self.sequence.output_ids):
            return self.sequence
        return replace(self.sequence, output_ids=np.array(self.output, np.int32))
