"""The KV route of a sequence that one engine (the prefill side) prefills and another engine (the decode side) decodes.

The sequence begins at the prefill side. Meanwhile a reservation at the decode side waits for the ticket, with which it
pulls the KV pages, and then for the first token. With the first token, Migration moves the sequence to the decode side.
A lost engine costs only time. If the reservation is lost, another decode side gets the ticket. If the prefill side is
lost, the decode side computes the prompt.
"""

from __future__ import annotations

import enum
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_common.ticket import KvTransfer
from quire_router import metrics
from quire_router.kv_transfer.pull import Pull
from quire_router.kv_transfer.reservation import Reservation
from quire_router.sequences.delta import ERROR, HopTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.migrator import Migrator
    from quire_router.kv_transfer.transfers import Transfers
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.kv_route import PulledPages, TransferSource
    from quire_router.sequences.sequence_state import SequenceState


class Step(enum.Enum):
    """PREFILL: the sequence is at the prefill side. DECODE: it has left the prefill side, and decodes or waits for an
    engine. OVER: the hand-off has ended."""

    PREFILL = 1
    DECODE = 2
    OVER = 3


class DecodeSide(Protocol):
    """The session with a decode side's scheduler."""

    instance: str

    def reserve(self, reservation: Reservation) -> None:
        """Reserve a place for a sequence that is at another engine."""

    def cancel(self, reservation: Reservation) -> None:
        """Drop the reservation, because no sequence will take it. Idempotent."""

    def adopt(self, sequence: SequenceState) -> None:
        """Give the reserved place to the sequence, which has the reservation's handle."""

    def hand_over_ticket(self, handle: int, ticket: Ticket) -> None:
        """Tell the scheduler where a reservation's pages are."""

    def hand_over_token(self, handle: int, token: bytes, *, give_up: bool) -> None:
        """Tell the scheduler which token the prefill side sampled. `give_up`: there is nothing more to pull."""


class Handoff:
    """The KvRoute of a hand-off. An attempt is one run of the sequence at an engine; its handle is the number by which
    the session knows it. To begin, submit the sequence to `source`, the prefill side, and call `reserve`."""

    def __init__(
        self, sequence: SequenceState, source: TransferSource, transfers: Transfers, migrator: Migrator
    ) -> None:
        self.step = Step.PREFILL
        self._sequence = sequence
        self._source = source
        self._transfers = transfers
        self._migrator = migrator
        self._pull = Pull()
        self._reservation: Reservation | None = None
        # The decode side that has the reservation, or had it last.
        self._reserved_at: DecodeSide | None = None
        self._prefilled_ns = 0
        # Whether a ticket has come.
        self._ticketed = False

    def reserve(self, session: DecodeSide, handle: int, load: LoadReservation) -> None:
        """Send a reservation under `handle` to the decode side `session`, for the sequence that is prefilled elsewhere.
        `load` is the load that placement has reserved for the sequence at that replica; the load is released when the
        pull is over, when the reservation or the prefill is lost, or when the hand-off ends."""
        self._pull.reserve_load(load)
        self._reservation, self._reserved_at = Reservation(self, self._sequence, handle), session
        session.reserve(self._reservation)

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        if self.step is Step.PREFILL:
            return KvTransfer(prefill_only=True)
        return self._pull.kv_transfer(holder)

    def ticket_came(self, ticket: Ticket, source: TransferSource) -> None:
        """Begin the pull with the first ticket: keep its transfer and renew its lease. If there is a reservation, pass
        the ticket on to the decode side. A later ticket is ignored, because a sequence that starts again at the prefill
        side keeps its first one; so is a ticket that comes after the sequence has left the prefill side."""
        if self.step is not Step.PREFILL or self._ticketed:
            return
        self._ticketed = True
        self._pull.begin(self._transfers.add(ticket, self._source))
        if self._reservation is not None and self._reserved_at is not None:
            self._reserved_at.hand_over_ticket(self._reservation.handle, ticket)
            self._pull.start()

    def prefill_ended(self, timings: Sequence[HopTiming]) -> None:
        """Add the prefill side's timings. If the sequence has not left the prefill side before, note the time, count
        whether its reservation still exists, and tell the migrator that the sequence needs its decode side now."""
        self._pull.add_timings(replace(one, service=f"prefill {one.service}") for one in timings)
        if self.step is not Step.PREFILL:
            return
        self._prefilled_ns = time.monotonic_ns()
        metrics.handoffs.labels("reserved" if self._reservation is not None else "late").inc()
        self._migrator.prefill_ended(self._sequence)

    def take_over(self) -> str:
        """Move the sequence to its reservation: begin the attempt under the reservation's handle, as admitted if the
        reservation is, and send the decode side the tokens that the prefill side has sampled since. If the prefill had
        not ended, or no ticket or no token came, tell the decode side that there is nothing to pull. A prefill that had
        not ended is counted as lost, and its transfer and the reserved load are released.

        Returns the instance of the decode side. Returns '' if there is no reservation, or if the sequence had left the
        prefill side before; in both cases it has left it now.
        """
        sequence, reservation, session = self._sequence, self._reservation, self._reserved_at
        if self.step is not Step.PREFILL:
            return ""
        self.step = Step.DECODE
        if not self._prefilled_ns:
            metrics.handoffs.labels("prefill_lost").inc()
            self._pull.release()
        if reservation is None or session is None:
            return ""
        self._reservation = None
        sequence.begin_attempt(reservation.handle, reservation.attempt)
        if reservation.admitted:
            sequence.engine.admit(reservation.attempt, reservation.cached_tokens)
        token = bytes(sequence.engine.output_ids[reservation.known_bytes :])
        session.adopt(sequence)
        give_up = not (token and self._prefilled_ns and self._ticketed)
        session.hand_over_token(reservation.handle, token, give_up=give_up)
        return session.instance

    def reservation_lost(self, failure: EngineFailure) -> None:
        """Drop the reservation and its reserved load, because its decode side was lost, or has refused or failed it,
        before the sequence took it over. Count the loss, and report it to the migrator. Unless the migrator fails the
        sequence, another decode side is chosen when the first token comes."""
        self._reservation = None
        self._pull.release_load()
        metrics.handoffs.labels("decode_lost").inc()
        self._migrator.reservation_lost(self._sequence, failure)

    def pages_pulled(self, found: PulledPages) -> None:
        self._pull.end(found)

    def row_came(self, finish: int, now_ns: int) -> None:
        """At the first row after the hand-off, record the time since the prefill ended, if it did end. At the
        sequence's last row, unless it is an error, close the hand-off. `now_ns` is a monotonic time. `finish` is the
        row's finish reason, 0 if this is not the last row."""
        if self.step is Step.DECODE and self._prefilled_ns:
            gap_us = (now_ns - self._prefilled_ns) // 1000
            metrics.second_token.observe(gap_us / 1e6)
            self._pull.add_timings([HopTiming("router", "handoff", gap_us)])
            self._prefilled_ns = 0
        if finish and finish != ERROR:
            self.close()

    def timings(self) -> Sequence[HopTiming]:
        return self._pull.timings

    def close(self) -> None:
        """End the hand-off: at the decode side, cancel a reservation that was not used, and count it; release the
        transfer and the reserved load. Idempotent."""
        if self.step is Step.OVER:
            return
        self.step = Step.OVER
        reservation, self._reservation = self._reservation, None
        if reservation is not None and self._reserved_at is not None:
            metrics.handoffs.labels("ended_first").inc()
            self._reserved_at.cancel(reservation)
        self._pull.release()
