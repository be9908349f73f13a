"""The decode side's part of a handover: who waits for a ticket or tokens, and goes on when they have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_scheduler.core.request import State

if TYPE_CHECKING:
    from quire_common.ticket import Ticket
    from quire_scheduler.core.lifecycle import Lifecycle
    from quire_scheduler.core.replica import Replica
    from quire_scheduler.core.request import Request
    from quire_scheduler.disaggregation.handover import Handover


class Handovers:
    """One core's. A request is in the queue once its pages may be pulled, or nothing more will come of them."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle) -> None:
        self._replica = replica
        self._records = replica.handovers
        self._lifecycle = lifecycle

    def submitted(self, request: Request) -> bool:
        """Note what a new request awaits; whether others need not wait for it yet, since pages or tokens that it cannot
        do without are to come."""
        asked = request.transfer
        if asked.await_handover:
            self._records.expect(request)
        self._offer(request, asked.ticket, asked.refusal)
        return self._records.is_awaited(request) and not self._replica.pulls.has_pull(request)

    def arrived(self, request: Request, handover: Handover, now: float) -> None:
        """What the other side has is handed over. One that has gone on by itself needs it no more."""
        if not request.transfer.await_handover or not request.waits:
            return
        # Later ones are of an attempt that this side did not wait for.
        if handover.tokens and self._records.lacks_token(request):
            try:
                self._replica.admission.check_tokens(request, handover.tokens)
            except QuireError as error:
                self._lifecycle.fail(request, error, now)
                return
            self._records.take_tokens(request, handover.tokens)
        self._offer(request, handover.ticket, handover.refusal)
        if handover.give_up:
            self._records.give_up(request)
            self._replica.pulls.give_up(request)
        self._go_on(request)

    def _offer(self, request: Request, ticket: Ticket | None, refusal: QuireError | None) -> None:
        """The first ticket of a request counts, be it of use or not, and none after all was given up."""
        if ticket is None and refusal is None:
            return
        if self._records.had_ticket(request):
            return
        self._records.take_ticket(request)
        if ticket is not None and refusal is None:
            refusal = self._replica.pulls.ticket_refusal(request, ticket)
        if ticket is None or refusal is not None:
            self._replica.pulls.ticket_refused(request, refusal)
        else:
            self._replica.pulls.accept_ticket(request, ticket)

    def _go_on(self, request: Request) -> None:
        waiting = self._replica.waiting
        if request.state is State.PULLING:
            self._replica.pulls.settle_pull(request)
        elif request.state is State.ASIDE:
            if self._replica.pulls.has_pull(request):
                # A request that was set aside waits for room, not for a handover.
                if waiting.is_parked(request):
                    waiting.recall(request)
            elif not self._records.is_awaited(request):
                waiting.recall(request)
