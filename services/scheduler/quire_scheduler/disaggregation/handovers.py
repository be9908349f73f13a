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
        self._lifecycle = lifecycle

    def submitted(self, request: Request) -> None:
        """A new request takes its place among those that wait."""
        asked = request.transfer
        request.lacks_token = asked.await_handover
        request.lacks_ticket = asked.await_handover
        self._offer(request, asked.ticket, asked.refusal)
        if request.lacks_ticket or (request.lacks_token and not self._replica.pulls.has_pull(request)):
            self._replica.waiting.park(request)
        else:
            self._replica.waiting.push(request)

    def arrived(self, request: Request, handover: Handover, now: float) -> None:
        """What the other side has is handed over. One that has gone on by itself needs it no more."""
        if not request.transfer.await_handover or not request.waits:
            return
        # Later ones are of an attempt that this side did not wait for.
        if handover.tokens and request.lacks_token:
            try:
                self._replica.admission.check_tokens(request, handover.tokens)
            except QuireError as error:
                self._lifecycle.fail(request, error, now)
                return
            request.output.extend(handover.tokens)
            request.lacks_token = False
        self._offer(request, handover.ticket, handover.refusal)
        if handover.give_up:
            request.lacks_ticket = request.lacks_token = False
            request.ticketed = True
            self._replica.pulls.give_up(request)
        self._go_on(request)

    def _offer(self, request: Request, ticket: Ticket | None, refusal: QuireError | None) -> None:
        """The first ticket of a request counts, be it of use or not, and none after all was given up."""
        if ticket is None and refusal is None:
            return
        if request.ticketed:
            return
        request.ticketed, request.lacks_ticket = True, False
        if ticket is not None and refusal is None:
            refusal = self._replica.pulls.refusal(request, ticket)
        if ticket is None or refusal is not None:
            self._replica.pulls.refused(request, refusal)
        else:
            self._replica.pulls.accept(request, ticket)

    def _go_on(self, request: Request) -> None:
        waiting = self._replica.waiting
        if request.state is State.PULLING:
            self._replica.pulls.settle(request)
        elif request.state is State.ASIDE:
            if self._replica.pulls.has_pull(request):
                # A request that was set aside waits for room, not for a handover.
                if waiting.is_parked(request):
                    waiting.recall(request)
            elif not request.awaits_handover:
                waiting.recall(request)
