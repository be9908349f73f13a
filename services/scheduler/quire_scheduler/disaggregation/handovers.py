"""Handovers: the decode side of a handover. A request waits for a ticket or tokens from the replica that prefills it,
and goes on when they have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import QuireError
from quire_scheduler.core.request import State
from quire_scheduler.disaggregation.handover import Handover

if TYPE_CHECKING:
    from quire_common.ticket import Ticket
    from quire_scheduler.core.lifecycle import Lifecycle
    from quire_scheduler.core.replica import Replica
    from quire_scheduler.core.request import Request


class Handovers:
    """The handovers of one core. A request that awaits one is parked until its pages may be pulled, or nothing
    more will come for it."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle) -> None:
        self._replica = replica
        self._records = replica.handovers
        self._lifecycle = lifecycle

    def submitted(self, request: Request) -> bool:
        """Note that a new request awaits a ticket and tokens, if its transfer says so, and take the ticket, or the
        refusal, that came with it. A ticket that can be used becomes a pull; otherwise the session is told why it is
        not. Returns whether the request must be parked, because it awaits something and has no ticket by which it may
        pull pages. No other request waits for a parked one."""
        asked = request.transfer
        if asked.await_handover:
            self._records.expect(request)
        self._offer(request, asked.ticket, asked.refusal)
        return self._records.is_awaited(request) and not self._replica.pulls.has_pull(request)

    def arrived(self, request: Request, handover: Handover, now: float) -> None:
        """Apply a handover, which brings tokens, a ticket or the end of waiting, and let the request go on if it has
        what it needs. Only the first tokens and the first ticket count. `give_up`: the request awaits nothing more, and
        its pull is given up (see `Pulls.give_up`). A handover is ignored if the request was submitted without
        `await_handover`, or is no longer in the pending queue. If the request could not go on after the tokens, it
        fails, and the rest of the handover is ignored."""
        if not request.transfer.await_handover or not request.waits:
            return
        # Later tokens belong to a prefill attempt that this side did not wait for.
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

    def end(self, request: Request, now: float) -> None:
        """Let a request go on without the handover that it awaits, because none can come any more. If it awaits
        nothing, nothing happens."""
        if self._records.is_awaited(request):
            self.arrived(request, Handover(give_up=True), now)

    def _offer(self, request: Request, ticket: Ticket | None, refusal: QuireError | None) -> None:
        """Record the ticket of a request's prefill, or the error that says why the ticket that came cannot be used
        (`refusal`). Without either, nothing happens. Only the first of these counts, and none after a give-up. A ticket
        that can be used becomes a pull. If it cannot be used, tell the session why."""
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
        """Let the request go on if it has what it waited for. A PULLING request's pull is settled (see `settle_pull`).
        An ASIDE request with a ticket to pull by returns to the queue if it is parked; one that was set aside waits for
        room, and stays. An ASIDE request without a ticket returns if it awaits nothing more. In any other state,
        nothing happens."""
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
