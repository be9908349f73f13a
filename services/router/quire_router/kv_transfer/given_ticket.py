"""The KV route of a sequence whose client names the engine that has prefilled its prompt. The sequence runs as any
other, but its Submit has the ticket for the pages of that engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.kv_transfer.pull import Pull
from quire_router.sequences.delta import ERROR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import KvTransfer, Ticket
    from quire_router.kv_transfer.transfer import Transfer
    from quire_router.sequences.delta import HopTiming
    from quire_router.sequences.kv_route import PulledPages, TransferSource


class GivenTicket:
    """The KvRoute of a sequence with such a ticket."""

    def __init__(self, transfer: Transfer) -> None:
        self._pull = Pull()
        self._pull.begin(transfer)

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        return self._pull.kv_transfer(holder)

    def ticket_came(self, ticket: Ticket, source: TransferSource) -> None:
        """Does nothing: no prefill side was asked for a ticket."""

    def prefill_ended(self, timings: Sequence[HopTiming]) -> None:
        """Does nothing: no prefill side was asked to compute."""

    def pages_pulled(self, found: PulledPages) -> None:
        self._pull.end(found)

    def row_came(self, finish: int, now_ns: int) -> None:
        """Release the transfer at the sequence's last row, unless this row ends the sequence with an error. Other rows
        change nothing."""
        if finish and finish != ERROR:
            self.close()

    def take_over(self) -> str:
        """Return '', because no other engine has a reservation for the sequence."""
        return ""

    def timings(self) -> Sequence[HopTiming]:
        return self._pull.timings

    def close(self) -> None:
        self._pull.release()
