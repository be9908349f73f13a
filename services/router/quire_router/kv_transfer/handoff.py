"""A choice that is prefilled at one engine and decoded at another: which step it is at, and what each side is told.

It begins at the prefill side, while a reservation at a decode side waits for the ticket and then for the first token.
With the token it goes over by the way of migration. Whatever is lost on the way costs time alone: without a
reservation another decode side gets the ticket; without the prefill side the decode side computes.
"""

from __future__ import annotations

import enum
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer
from quire_router import metrics
from quire_router.kv_transfer.pulling import Pulling
from quire_router.kv_transfer.reservation import Reservation
from quire_router.sequences.delta import ERROR, HopTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.migrator import Migrator
    from quire_router.kv_transfer.transfers import Transfers
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.replicas.session import Session
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.kv_route import PulledPages
    from quire_router.sequences.sequence_state import SequenceState


class Step(enum.Enum):
    """PREFILL: the choice is at the prefill side. DECODE: where it decodes, or looks for a place. OVER: all is done."""

    PREFILL = 1
    DECODE = 2
    OVER = 3


class Handoff:
    """A KvRoute. `reserve` and the choice's submit to `source` begin it."""

    def __init__(self, sequence: SequenceState, source: Session, transfers: Transfers, migrator: Migrator) -> None:
        self.step = Step.PREFILL
        self._sequence = sequence
        self._source = source
        self._transfers = transfers
        self._migrator = migrator
        self._pulling = Pulling()
        self._reservation: Reservation | None = None
        # The decode side where the reservation is, or was last.
        self._reserved_at: Session | None = None
        self._prefilled_ns = 0
        # Whether there is, or was, something to pull.
        self._ticketed = False

    def reserve(self, session: Session, handle: int, placed: LoadReservation) -> None:
        """Keep a place at a decode side, as it was placed there."""
        self._pulling.placed = placed
        self._reservation, self._reserved_at = Reservation(self, self._sequence, handle), session
        session.reserve(self._reservation)

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        if self.step is Step.PREFILL:
            return KvTransfer(prefill_only=True)
        return self._pulling.kv_transfer(holder)

    def admitted(self, ticket: Ticket) -> None:
        if self.step is not Step.PREFILL or self._ticketed:  # one that starts again keeps its ticket
            return
        self._ticketed = True
        self._pulling.begin(self._transfers.add(ticket, self._source))
        if self._reservation is not None and self._reserved_at is not None:
            self._reserved_at.hand_over_ticket(self._reservation.handle, ticket)
            if self._pulling.placed is not None:
                self._pulling.placed.start_pull()

    def prefilled(self, timings: Sequence[HopTiming]) -> None:
        self._pulling.timings += [replace(one, service=f"prefill {one.service}") for one in timings]
        if self.step is not Step.PREFILL:
            return
        self._prefilled_ns = time.monotonic_ns()
        metrics.handoffs.labels("reserved" if self._reservation is not None else "late").inc()
        self._migrator.prefilled(self._sequence)

    def take_over(self) -> str:
        """The choice goes to its reservation, with the tokens that the prefill side drew."""
        sequence, reservation, session = self._sequence, self._reservation, self._reserved_at
        if self.step is not Step.PREFILL:
            return ""
        self.step = Step.DECODE
        if not self._prefilled_ns:
            metrics.handoffs.labels("prefill_lost").inc()
            self._pulling.let_go()
        if reservation is None or session is None:
            return ""
        self._reservation = None
        sequence.renew(reservation.handle, reservation.attempt)
        if reservation.admitted:
            sequence.admitted_attempt = reservation.attempt
            if not sequence.resumed:
                sequence.cached_tokens = reservation.cached_tokens
        token = bytes(sequence.output_ids[reservation.known_bytes :])
        session.adopt(sequence)
        give_up = not (token and self._prefilled_ns and self._ticketed)
        session.hand_over_token(reservation.handle, token, give_up=give_up)
        return session.instance

    def reservation_lost(self, failure: EngineFailure) -> None:
        """The decode side is lost ahead of the token: another is looked for when that comes."""
        self._reservation = None
        self._pulling.unplace()
        metrics.handoffs.labels("decode_lost").inc()
        self._migrator.place_lost(self._sequence, failure)

    def pulled(self, found: PulledPages) -> None:
        self._pulling.pulled(found)

    def received(self, finish: int, now_ns: int) -> None:
        if self.step is Step.DECODE and self._prefilled_ns:
            gap_us = (now_ns - self._prefilled_ns) // 1000
            metrics.second_token.observe(gap_us / 1e6)
            self._pulling.timings.append(HopTiming("router", "handoff", gap_us))
            self._prefilled_ns = 0
        if finish and finish != ERROR:
            self.close()

    def timings(self) -> Sequence[HopTiming]:
        return self._pulling.timings

    def close(self) -> None:
        if self.step is Step.OVER:
            return
        self.step = Step.OVER
        reservation, self._reservation = self._reservation, None
        if reservation is not None and self._reserved_at is not None:
            metrics.handoffs.labels("ended_first").inc()
            self._reserved_at.cancel(reservation)
        self._pulling.let_go()
