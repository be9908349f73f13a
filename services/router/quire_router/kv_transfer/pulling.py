"""A decode side's use of one transfer: the ticket that its Submit carries, what came of the pull, and the end of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer
from quire_router import metrics
from quire_router.sequences.delta import HopTiming

if TYPE_CHECKING:
    from quire_router.kv_transfer.transfer import Transfer
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.sequences.kv_route import PulledPages


class Pulling:
    """`transfer` None: there is nothing to pull (any more). `placed`: where it counts until then."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        self.placed: LoadReservation | None = None
        self.timings: list[HopTiming] = []

    def begin(self, transfer: Transfer) -> None:
        """Pages may be pulled with this."""
        self.transfer = transfer

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        """For a Submit to this holder. Who lends the pages has them."""
        if self.transfer is None or not self.transfer.open or holder is self.transfer.source:
            return None
        return KvTransfer(ticket=self.transfer.ticket)

    def pulled(self, found: PulledPages) -> None:
        """The puller needs the ticket no more."""
        if found.error is not None:
            metrics.pull_failures.labels(found.error.code).inc()
        metrics.pulled_pages.inc(found.pages)
        metrics.pulls.observe(found.us / 1e6)
        self.timings.append(HopTiming("transfer", "pull", found.us, found.pages, found.instance))
        self.let_go()

    def unplace(self) -> None:
        """The pages are no work ahead of others any more. Idempotent."""
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.release()

    def let_go(self) -> None:
        """Nobody pulls. Idempotent."""
        self.unplace()
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.release()
