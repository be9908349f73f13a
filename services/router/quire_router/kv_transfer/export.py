"""The KV route of an export: the client wants a prompt computed, and its KV pages kept. The sequence ends with its
first token, and the answer says how to get the pages. The client decides who pulls them and when, so the router does
not renew their lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer
from quire_router.kv_transfer.transfer import Transfer
from quire_router.sequences.kv_route import KvOffer, host_and_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.migrator import Migrator
    from quire_router.sequences.delta import HopTiming
    from quire_router.sequences.kv_route import PulledPages, TransferSource
    from quire_router.sequences.sequence_state import SequenceState


class Export:
    """The KvRoute of an export. The transfer is released if the sequence is aborted, or fails before the prefill has
    ended."""

    def __init__(self, sequence: SequenceState, migrator: Migrator, lease_ms: int) -> None:
        self._sequence = sequence
        self._migrator = migrator
        self._lease_ms = lease_ms
        self._transfer: Transfer | None = None
        self._timings: list[HopTiming] = []

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        return KvTransfer(prefill_only=True, lease_ms=self._lease_ms)

    def ticket_came(self, ticket: Ticket, source: TransferSource) -> None:
        """Make a transfer of the ticket, and offer its pages to the client: engine, address, transfer id and sizes. The
        router does not renew its lease. A ticket is ignored while there is a transfer, because a sequence that starts
        again at the engine keeps its first ticket. After `take_over`, the ticket of the next engine counts."""
        if self._transfer is not None:
            return
        self._transfer = Transfer(ticket, source, of_session=False)
        host, port = host_and_port(source.address)
        offer = KvOffer(
            source.instance, host, port, ticket.transfer_id, ticket.pages, ticket.tokens(), len(ticket.sources)
        )
        self._sequence.kv.offer_pages(offer)

    def prefill_ended(self, timings: Sequence[HopTiming]) -> None:
        """Add the timings, end the sequence with finish reason `length` after its one token, and tell the migrator that
        the engine is done with the sequence."""
        self._timings += timings
        self._sequence.engine.end_at_length()
        self._migrator.prefill_ended(self._sequence)

    def pages_pulled(self, found: PulledPages) -> None:
        """Does nothing: no decode side pulls these pages."""

    def row_came(self, finish: int, now_ns: int) -> None: ...

    def take_over(self) -> str:
        """Release the transfer, because the sequence begins anew on another engine, which makes another ticket. Returns
        '', because no engine has a reservation for the sequence."""
        self._release()
        return ""

    def timings(self) -> Sequence[HopTiming]:
        return self._timings

    def close(self) -> None:
        """Release the transfer and withdraw the offer, unless the sequence has ended with a finish reason. In this
        case, which includes a failure after the prefill has ended, its pages stay until their lease ends."""
        if not (self._sequence.client.ended and self._sequence.client.finish):
            self._release()

    def _release(self) -> None:
        """Withdraw the offer and release the transfer, if there is one."""
        transfer, self._transfer = self._transfer, None
        self._sequence.kv.withdraw_offer()
        if transfer is not None:
            transfer.release()
