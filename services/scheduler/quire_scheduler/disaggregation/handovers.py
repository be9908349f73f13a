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
    """Handovers of one core. A request is in the queue once its pages may be pulled, or nothing more will come of
    them."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle) -> None:
        self._replica = replica
        self._records = replica.handovers
        self._lifecycle = lifecycle

    def submitted(self, request: Request) -> bool:
        """Note which ticket or tokens a new request awaits, and take the ticket that came with it. Returns whether it
        is to be parked, so that nobody waits for it: something must come from another engine before it can go on."""
        asked = request.transfer
        if asked.await_handover:
            self._records.expect(request)
        self._offer(request, asked.ticket, asked.refusal)
        return self._records.is_awaited(request) and not self._replica.pulls.has_pull(request)

    def arrived(self, request: Request, handover: Handover, now: float) -> None:
        """Take the tokens, the ticket or the end of waiting that a handover brings, and let the request go on. Ignored
        where the request does not await it or runs by now. Tokens that it could not go on after make the request
        fail."""
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
        """Take the request's first ticket, or its refusal; later ones, and those after a give-up, are ignored. The
        session is told of a ticket that is of no use."""
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
        """Let the request go on if what it waited for has come: settle its pull, or return it to the queue."""
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
