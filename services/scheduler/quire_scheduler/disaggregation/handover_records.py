"""What each request still awaits of its handover, by uid: a ticket for its pages, tokens, or neither.

Knows nothing of queues, pages and pulls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_scheduler.core.request import Request


class HandoverRecords:
    """The requests of one core that still await a ticket or a token of a hand-over."""

    def __init__(self) -> None:
        self._lack_ticket: set[int] = set()
        self._lack_token: set[int] = set()
        # A ticket came for these, of use or not, or none will.
        self._ticketed: set[int] = set()

    def expect(self, request: Request) -> None:
        """A ticket and a token are to come for the request."""
        self._lack_ticket.add(request.uid)
        self._lack_token.add(request.uid)

    def lacks_ticket(self, request: Request) -> bool:
        """Whether a ticket is to come."""
        return request.uid in self._lack_ticket

    def lacks_token(self, request: Request) -> bool:
        """Whether the token that another engine draws is to come."""
        return request.uid in self._lack_token

    def is_awaited(self, request: Request) -> bool:
        """Whether a ticket or tokens are to come from another engine."""
        return request.uid in self._lack_token or request.uid in self._lack_ticket

    def awaited(self) -> set[int]:
        """Uids of the requests for which a ticket or tokens are to come."""
        return self._lack_token | self._lack_ticket

    def had_ticket(self, request: Request) -> bool:
        """Whether a ticket came, of use or not, or none will come any more."""
        return request.uid in self._ticketed

    def take_ticket(self, request: Request) -> None:
        """The request's ticket came. `had_ticket` was False: the first one counts."""
        require(request.uid not in self._ticketed, "a request takes a second ticket")
        self._ticketed.add(request.uid)
        self._lack_ticket.discard(request.uid)

    def take_tokens(self, request: Request, tokens: Iterable[int]) -> None:
        """Tokens that another engine drew go on the request's output. `lacks_token` was True."""
        require(request.uid in self._lack_token, "a request takes tokens that it does not lack")
        request.output.extend(tokens)
        self._lack_token.discard(request.uid)

    def give_up(self, request: Request) -> None:
        """Note that nothing more will come for the request."""
        self._lack_ticket.discard(request.uid)
        self._lack_token.discard(request.uid)
        self._ticketed.add(request.uid)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        for records in (self._lack_ticket, self._lack_token, self._ticketed):
            records.discard(request.uid)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Every record is of a request that lives."""
        living = {request.uid for request in requests}
        require(self._lack_ticket | self._lack_token | self._ticketed <= living, "a handover is of no request")
        require(self._lack_ticket.isdisjoint(self._ticketed), "a request awaits the ticket that it had")
