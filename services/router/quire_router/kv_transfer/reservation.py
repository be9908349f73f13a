"""A place kept at a decode side for a sequence that is prefilled elsewhere: a request of its own there, with a handle
and an attempt, until the sequence takes it over. The hand-off decides when: see handoff.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_common.ticket import KvTransfer

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.sequence import Sequence
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.kv_route import PulledPages
    from quire_router.sequences.sequence_state import SequenceState


class ReservationOwner(Protocol):
    """Hears what becomes of its reservation."""

    def reservation_lost(self, failure: EngineFailure) -> None:
        """The decode side has dropped the reservation."""

    def pages_pulled(self, found: PulledPages) -> None:
        """The decode side has pulled the pages, before the sequence came."""


class Reservation:
    """A Submission. Its session tells it what becomes of it, and forgets it when it is lost, cancelled or adopted."""

    def __init__(self, owner: ReservationOwner, sequence: SequenceState, handle: int) -> None:
        self.handle = handle
        self.attempt = sequence.promise_attempt()
        self.context = replace(sequence.context, attempt=self.attempt)
        self.known_bytes = len(sequence.engine.output_ids)
        self.admitted = False
        self.cached_tokens = 0
        # The other side computes its pages now, which then are in the kvstore too.
        self.held_tokens: int | None = None
        self._spec = sequence.to_submit()
        self._owner = owner
        self._sequence = sequence

    def admit(self, attempt: int, cached_tokens: int) -> None:
        """Note that the decode side has begun, if it names this attempt."""
        if attempt == self.attempt:
            self.admitted, self.cached_tokens = True, cached_tokens

    def to_submit(self) -> Sequence:
        return self._spec

    def kv_transfer(self) -> KvTransfer:
        return KvTransfer(await_handover=True)

    def fail(self, error: QuireError) -> None:
        """Fail the sequence: the fault is the request's own, so no other engine would take it."""
        self._sequence.fail(error)

    def lost(self, failure: EngineFailure) -> None:
        """Tell the owner that the decode side has dropped the reservation."""
        self._owner.reservation_lost(failure)

    def pages_pulled(self, found: PulledPages) -> None:
        """Tell the owner that the pages have come before the token."""
        self._owner.pages_pulled(found)
