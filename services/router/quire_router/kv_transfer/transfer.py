"""A transfer: the KV pages of one ticket. A prefill side keeps them until the transfer is released or its lease ends.
This module knows nothing of the engine that pulls the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_common.ticket import Ticket
    from quire_router.sequences.kv_route import TransferSource


class Transfer:
    """One transfer. Transfers makes it, and renews its lease while it is `open`; an export makes its own. With
    `of_session`, the transfer was made in this router's session with the scheduler, so the scheduler takes the pages
    back when the session ends."""

    def __init__(self, ticket: Ticket, source: TransferSource, *, of_session: bool) -> None:
        self.ticket = ticket
        self.source = source
        self._life = source.life if of_session else 0
        self._released = False

    @property
    def open(self) -> bool:
        """Whether the transfer was not released and, with `of_session`, its session has not ended. Does not know
        whether the lease has ended."""
        return not self._released and self._life in (0, self.source.life)

    @property
    def lease_s(self) -> float:
        """How long the pages are kept without renewal."""
        return self.ticket.lease_ms / 1000

    def release(self) -> None:
        """If the transfer is still open, let the prefill side take the pages back. While the session with that side is
        closed, nothing is sent, and the pages stay until the lease ends. Idempotent."""
        if self.open:
            self.source.release_transfer(self.ticket.transfer_id)
        self._released = True
