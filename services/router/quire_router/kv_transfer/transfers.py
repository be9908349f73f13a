"""Renews the leases of all open transfers. At each third of the shortest lease, each scheduler that has open transfers
gets one message that renews all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire_router.kv_transfer.transfer import Transfer

if TYPE_CHECKING:
    from quire_common.ticket import Ticket
    from quire_router.sequences.kv_route import TransferSource

_LEAST_PERIOD_S = 0.05
# The lease of a ticket that does not say how long it lasts.
_UNSAID_LEASE_S = 10.0


class Transfers:
    """The open transfers of this process; all methods run in the event loop."""

    def __init__(self) -> None:
        self._open: set[Transfer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")

    def __len__(self) -> int:
        """Return the number of open transfers."""
        return sum(transfer.open for transfer in list(self._open))

    def add(self, ticket: Ticket, source: TransferSource, *, of_session: bool = True) -> Transfer:
        """Make a transfer from the ticket of the engine `source`; its lease is renewed until its release. With
        `of_session`, the transfer also ends with the present session with that scheduler."""
        transfer = Transfer(ticket, source, of_session=of_session)
        self._open.add(transfer)
        self._wake_in(_period_s(transfer))
        return transfer

    def close(self) -> None:
        """Stop renewing, and forget all transfers. They are not released; their leases expire."""
        if self._timer is not None:
            self._timer.cancel()
        self._open.clear()

    def _renew(self) -> None:
        """Renew all open transfers, with one message per scheduler; a scheduler whose session is closed gets none.
        Forget transfers that are not open any more, and set the timer for the next renewal."""
        self._timer, self._due_s = None, float("inf")
        self._open = {transfer for transfer in self._open if transfer.open}
        by_source: dict[TransferSource, list[bytes]] = {}
        for transfer in self._open:
            by_source.setdefault(transfer.source, []).append(transfer.ticket.transfer_id)
        for source, transfer_ids in by_source.items():
            source.renew_transfers(transfer_ids)
        if self._open:
            self._wake_in(min(map(_period_s, self._open)))

    def _wake_in(self, period_s: float) -> None:
        """Set the timer so that `_renew` is called after `period_s` or earlier. A timer that is due earlier stays."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + period_s
        if due_s >= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = loop.call_at(due_s, self._renew)


def _period_s(transfer: Transfer) -> float:
    """Return the seconds between two renewals of the transfer: a third of its lease, but at least 0.05. A ticket
    without a lease counts as one of ten seconds."""
    return max((transfer.lease_s or _UNSAID_LEASE_S) / 3, _LEAST_PERIOD_S)
