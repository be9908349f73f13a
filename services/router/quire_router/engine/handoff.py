"""A choice that is prefilled at one engine and decoded at another: which step it is at, and what each side is told.

It begins at the prefill side, while a reservation at a decode side waits for the ticket and then for the first token.
With the token it goes over by the way of migration. Whatever is lost on the way costs time alone: without a
reservation another decode side gets the ticket; without the prefill side the decode side computes.
"""

from __future__ import annotations

import enum
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_router import metrics
from quire_router.core.delta import ERROR, HopTiming
from quire_router.core.kv_route import KvTransfer
from quire_router.engine.reservation import Reservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import Ticket
    from quire_router.core.choice import Choice, Holder
    from quire_router.core.kv_route import PulledPages
    from quire_router.engine.loss import Loss
    from quire_router.engine.session import Session
    from quire_router.engine.transfer import Transfer
    from quire_router.engine.transfers import Transfers


class Mover(Protocol):
    """Finds engines: the migration."""

    def prefilled(self, choice: Choice) -> None:
        """Its prefill side has done its part and has let go of it: it needs a decode side."""

    def place_lost(self, choice: Choice, loss: Loss) -> None:
        """An engine that was to have it is no more; the choice itself is well."""


class Step(enum.Enum):
    """PREFILL: the choice is at the prefill side. DECODE: where it decodes, or looks for a place. OVER: all is done."""

    PREFILL = 1
    DECODE = 2
    OVER = 3


class Handoff:
    """A KvRoute. `reserve` and the choice's submit to `source` begin it."""

    def __init__(self, choice: Choice, source: Session, transfers: Transfers, mover: Mover) -> None:
        self.step = Step.PREFILL
        self._choice = choice
        self._source = source
        self._transfers = transfers
        self._mover = mover
        self._transfer: Transfer | None = None
        self._reservation: Reservation | None = None
        self._prefilled_ns = 0
        self._timings: list[HopTiming] = []

    def reserve(self, session: Session, handle: int) -> None:
        """Keep a place at a decode side."""
        self._reservation = Reservation(self, self._choice, session, handle)
        session.reserve(self._reservation)

    def kv_transfer(self, holder: Holder | None) -> KvTransfer | None:
        """See KvRoute."""
        if self.step is Step.PREFILL:
            return KvTransfer(prefill_only=True)
        if self._transfer is None or not self._transfer.open or holder is self._source:
            return None
        return KvTransfer(ticket=self._transfer.ticket)

    def admitted(self, ticket: Ticket) -> None:
        """See KvRoute."""
        if self.step is not Step.PREFILL:
            return
        if self._transfer is not None:
            self._transfer.release()
        self._transfer = self._transfers.add(ticket, self._source)
        if self._reservation is not None:
            self._reservation.session.hand_over_ticket(self._reservation.handle, ticket)

    def prefilled(self, timings: Sequence[HopTiming]) -> None:
        """See KvRoute."""
        self._timings += [replace(one, service=f"prefill {one.service}") for one in timings]
        if self.step is not Step.PREFILL:
            return
        self._prefilled_ns = time.monotonic_ns()
        metrics.handoffs.labels("reserved" if self._reservation is not None else "late").inc()
        self._mover.prefilled(self._choice)

    def take_over(self) -> str:
        """See KvRoute. The choice goes to its reservation, with the tokens that the prefill side drew."""
        choice, reservation = self._choice, self._reservation
        if self.step is not Step.PREFILL:
            return ""
        self.step = Step.DECODE
        if not self._prefilled_ns:
            metrics.handoffs.labels("prefill_lost").inc()
            self._let_go()
        if reservation is None:
            return ""
        self._reservation = None
        choice.renew(reservation.handle, reservation.attempt)
        if reservation.admitted:
            choice.admitted_attempt = reservation.attempt
            if not choice.resumed:
                choice.cached_tokens = reservation.cached_tokens
        token = bytes(choice.output_ids[reservation.known_bytes :])
        reservation.session.adopt(choice)
        give_up = not token or not self._prefilled_ns or self._transfer is None
        reservation.session.hand_over_token(reservation.handle, token, give_up=give_up)
        return reservation.session.instance

    def reservation_lost(self, loss: Loss) -> None:
        """The decode side is lost ahead of the token: another is looked for when that comes."""
        self._reservation = None
        metrics.handoffs.labels("decode_lost").inc()
        self._mover.place_lost(self._choice, loss)

    def pulled(self, found: PulledPages) -> None:
        """See KvRoute."""
        if found.error is not None:
            metrics.pull_failures.labels(found.error.code).inc()
        metrics.pulled_pages.inc(found.pages)
        metrics.pulls.observe(found.us / 1e6)
        self._timings.append(HopTiming("transfer", "pull", found.us, found.pages, found.instance))
        self._let_go()

    def received(self, finish: int, now_ns: int) -> None:
        """See KvRoute."""
        if self.step is Step.DECODE and self._prefilled_ns:
            gap_us = (now_ns - self._prefilled_ns) // 1000
            metrics.second_token.observe(gap_us / 1e6)
            self._timings.append(HopTiming("router", "handoff", gap_us))
            self._prefilled_ns = 0
        if finish and finish != ERROR:
            self.close()

    def timings(self) -> Sequence[HopTiming]:
        """See KvRoute."""
        return self._timings

    def close(self) -> None:
        """See KvRoute."""
        if self.step is Step.OVER:
            return
        self.step = Step.OVER
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            metrics.handoffs.labels("ended_first").inc()
            reservation.session.cancel(reservation)
        self._let_go()

    def _let_go(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.release()
