"""HandoverRecords: what each request of this core still awaits from the replica that prefills it: a ticket for its
pages, tokens, or nothing.

Records are kept by the request's uid. This module knows nothing of queues, pages and pulls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_scheduler.core.request import Request


class HandoverRecords:
    """The requests of one core that still await a ticket or a token of a handover."""

    def __init__(self) -> None:
        self._lack_ticket: set[int] = set()
        self._lack_token: set[int] = set()
        # Requests whose ticket has come, whether it can be used or not, or for which none will come.
        self._ticketed: set[int] = set()

    def expect(self, request: Request) -> None:
        """Note that the request awaits a ticket and a token."""
        self._lack_ticket.add(request.uid)
        self._lack_token.add(request.uid)

    def lacks_ticket(self, request: Request) -> bool:
        """Whether the request still awaits its ticket."""
        return request.uid in self._lack_ticket

    def lacks_token(self, request: Request) -> bool:
        """Whether the request still awaits the token that another engine samples."""
        return request.uid in self._lack_token

    def is_awaited(self, request: Request) -> bool:
        """Whether the request still awaits a ticket or a token from another engine."""
        return request.uid in self._lack_token or request.uid in self._lack_ticket

    def awaited(self) -> set[int]:
        """Return the uids of the requests that still await a ticket or a token."""
        return self._lack_token | self._lack_ticket

    def had_ticket(self, request: Request) -> bool:
        """Whether the request's ticket has come, usable or not, or no ticket will come any more."""
        return request.uid in self._ticketed

    def take_ticket(self, request: Request) -> None:
        """Note that the request's ticket came, so that it awaits none any more. Only the first one counts: the caller
        has checked that `had_ticket` is False; AssertionError otherwise."""
        require(request.uid not in self._ticketed, "a request takes a second ticket")
        self._ticketed.add(request.uid)
        self._lack_ticket.discard(request.uid)

    def take_tokens(self, request: Request, tokens: Iterable[int]) -> None:
        """Append to the request's output the tokens that another engine sampled; it awaits no token any more. The
        caller has checked `lacks_token`; AssertionError otherwise."""
        require(request.uid in self._lack_token, "a request takes tokens that it does not lack")
        request.output.extend(tokens)
        self._lack_token.discard(request.uid)

    def give_up(self, request: Request) -> None:
        """Note that nothing more will come for the request."""
        self._lack_ticket.discard(request.uid)
        self._lack_token.discard(request.uid)
        self._ticketed.add(request.uid)

    def forget(self, request: Request) -> None:
        """Drop the records of a request that has ended."""
        for records in (self._lack_ticket, self._lack_token, self._ticketed):
            records.discard(request.uid)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless every record belongs to one of these requests, which have not ended, and no
        request awaits a ticket that came or was given up."""
        living = {request.uid for request in requests}
        require(self._lack_ticket | self._lack_token | self._ticketed <= living, "a handover is of no request")
        require(self._lack_ticket.isdisjoint(self._ticketed), "a request awaits the ticket that it had")
