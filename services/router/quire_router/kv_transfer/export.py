"""A choice of which the client wants the prompt computed and its pages kept: it ends with its first token, and its
answer says how to have the pages. Who comes for them, and when, is the client's business: nobody renews the lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer
from quire_router.kv_transfer.transfer import Transfer
from quire_router.replicas.session import Session
from quire_router.sequences.delta import LENGTH, HopTiming
from quire_router.sequences.kv_route import KvOffer, host_and_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.migrator import Migrator
    from quire_router.sequences.kv_route import PulledPages
    from quire_router.sequences.sequence_state import SequenceState


class Export:
    """A KvRoute. The transfer is let go of where the choice does not end as it should."""

    def __init__(self, sequence: SequenceState, migrator: Migrator, lease_ms: int) -> None:
        self._sequence = sequence
        self._migrator = migrator
        self._lease_ms = lease_ms
        self._transfer: Transfer | None = None
        self._timings: list[HopTiming] = []

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        return KvTransfer(prefill_only=True, lease_ms=self._lease_ms)

    def admitted(self, ticket: Ticket) -> None:
        source = self._sequence.holder
        if not isinstance(source, Session) or self._transfer is not None:  # one that starts again keeps its ticket
            return
        self._transfer = Transfer(ticket, source, of_session=False)
        host, port = host_and_port(source.address)
        self._sequence.kv_offer = KvOffer(
            source.instance, host, port, ticket.transfer_id, ticket.pages, ticket.tokens(), len(ticket.sources)
        )

    def prefilled(self, timings: Sequence[HopTiming]) -> None:
        self._timings += timings
        self._sequence.finish = LENGTH
        self._migrator.prefilled(self._sequence)

    def pulled(self, found: PulledPages) -> None:
        """Does nothing: no decode side pulls these pages."""

    def received(self, finish: int, now_ns: int) -> None: ...

    def take_over(self) -> str:
        """The sequence begins anew on another engine, which makes another ticket."""
        self._let_go()
        return ""

    def timings(self) -> Sequence[HopTiming]:
        return self._timings

    def close(self) -> None:
        if not (self._sequence.ended and self._sequence.finish):
            self._let_go()

    def _let_go(self) -> None:
        transfer, self._transfer = self._transfer, None
        self._sequence.kv_offer = None
        if transfer is not None:
            transfer.release()
