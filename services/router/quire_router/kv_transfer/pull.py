"""The pull of a sequence's KV pages by a decode side: provides the ticket for the Submit, records the result, and
releases the transfer at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.ticket import KvTransfer
from quire_router import metrics
from quire_router.sequences.delta import HopTiming

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_router.kv_transfer.transfer import Transfer
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.sequences.kv_route import PulledPages


class Pull:
    """The pull of one sequence. `transfer` is None before the pull begins and after it has ended."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        self.timings: list[HopTiming] = []
        # The load that is reserved at the decode side until the pages are there.
        self._load: LoadReservation | None = None

    def reserve_load(self, reservation: LoadReservation) -> None:
        """Keep the load that placement has reserved for these pages at the decode side."""
        self._load = reservation

    def begin(self, transfer: Transfer) -> None:
        """Set the transfer whose pages are pulled."""
        self.transfer = transfer

    def start(self) -> None:
        """Count the pages as being pulled from now on, because the decode side has the ticket."""
        if self._load is not None:
            self._load.start_pull()

    def kv_transfer(self, holder: object) -> KvTransfer | None:
        """Return the ticket for a Submit to the session `holder`. Returns None if there is nothing to pull, if the
        transfer is not open any more, or if `holder` is the engine that has the pages."""
        if self.transfer is None or not self.transfer.open or holder is self.transfer.source:
            return None
        return KvTransfer(ticket=self.transfer.ticket)

    def end(self, found: PulledPages) -> None:
        """Record the result of the pull in metrics and timings. Release the transfer, because the ticket is not needed
        any more, and the reserved load."""
        if found.error is not None:
            metrics.pull_failures.labels(found.error.code).inc()
        metrics.pulled_pages.inc(found.pages)
        metrics.pulls.observe(found.us / 1e6)
        self.timings.append(HopTiming("transfer", "pull", found.us, found.pages, found.instance))
        self.release()

    def add_timings(self, timings: Iterable[HopTiming]) -> None:
        """Add timings of phases before or after the pull."""
        self.timings += timings

    def release_load(self) -> None:
        """Release the reserved load, because the pull no longer delays other requests. Idempotent."""
        load, self._load = self._load, None
        if load is not None:
            load.release()

    def release(self) -> None:
        """Release the transfer and the reserved load, because no engine pulls the pages any more. Idempotent."""
        self.release_load()
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.release()
