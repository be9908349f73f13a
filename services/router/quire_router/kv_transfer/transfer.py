"""One ticket's pages, lent by a prefill side: released once, on every path. Knows nothing of what pulls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_common.ticket import Ticket
    from quire_router.sequences.kv_route import TransferSource


class Transfer:
    """Made by Transfers, which renews it while it is `open`. `of_session`: its scheduler takes the pages back when this
    router's session ends, since the transfer was made there."""

    def __init__(self, ticket: Ticket, source: TransferSource, *, of_session: bool) -> None:
        self.ticket = ticket
        self.source = source
        self._life = source.life if of_session else 0
        self._released = False

    @property
    def open(self) -> bool:
        """Whether the pages may still be pulled."""
        return not self._released and self._life in (0, self.source.life)

    @property
    def lease_s(self) -> float:
        """How long the pages are kept without renewal."""
        return self.ticket.lease_ms / 1000

    def release(self) -> None:
        """Let the prefill side take the pages back, if they may still be pulled. Idempotent."""
        if self.open:
            self.source.release_transfer(self.ticket.transfer_id)
        self._released = True
