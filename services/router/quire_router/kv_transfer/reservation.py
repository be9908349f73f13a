"""A reservation: a place at a decode side for a sequence that another engine prefills. At the decode side's scheduler,
the reservation is a request with its own handle and attempt, until the sequence takes over both. handoff.py decides
when that happens."""

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
    """The object that is told about events of its reservation."""

    def reservation_lost(self, failure: EngineFailure) -> None:
        """The decode side has dropped the reservation."""

    def pages_pulled(self, found: PulledPages) -> None:
        """The decode side's pull is over, with all, some or none of the pages, before the sequence has taken over the
        reservation."""


class Reservation:
    """A Submission for a place. The session of the decode side calls its methods, and forgets it when it is lost,
    cancelled or adopted."""

    def __init__(self, owner: ReservationOwner, sequence: SequenceState, handle: int) -> None:
        self.handle = handle
        self.attempt = sequence.promise_attempt()
        self.context = replace(sequence.context, attempt=self.attempt)
        self.known_bytes = len(sequence.engine.output_ids)
        self.admitted = False
        self.cached_tokens = 0
        # Not known: the prefill side computes the pages now, and may store them in the kvstore.
        self.held_tokens: int | None = None
        self._spec = sequence.to_submit()
        self._owner = owner
        self._sequence = sequence

    def admit(self, attempt: int, cached_tokens: int) -> None:
        """Note that the decode side has admitted the reservation, if `attempt` is the reservation's attempt."""
        if attempt == self.attempt:
            self.admitted, self.cached_tokens = True, cached_tokens

    def to_submit(self) -> Sequence:
        return self._spec

    def kv_transfer(self) -> KvTransfer:
        return KvTransfer(await_handover=True)

    def fail(self, error: QuireError) -> None:
        """Fail the sequence, because the request itself is at fault, so that no other engine would take it."""
        self._sequence.fail(error)

    def lost(self, failure: EngineFailure) -> None:
        """Tell the owner that the decode side has dropped the reservation."""
        self._owner.reservation_lost(failure)

    def pages_pulled(self, found: PulledPages) -> None:
        """Tell the owner that the pull is over before the first token, with all, some or none of the pages."""
        self._owner.pages_pulled(found)
