"""Holdings: pages that are held without a slot, by requests that pull or for other engines, and how they are freed when
pages run short.

Running requests come first. If pages are lacking, the latest of the pulling requests give back their pages, then the
latest transfers are ended. This module knows nothing of slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request
    from quire_scheduler.disaggregation.pulls import Pulls
    from quire_scheduler.disaggregation.transfers import Transfers
    from quire_scheduler.kv.page_pools import PagePools

# If nothing runs, the queue's head waits this long for pages that are held without a slot.
PATIENCE_S = 1.0


class Holdings:
    """The pages that one core's pulls and transfers hold, and how long the queue's head has lacked pages."""

    def __init__(self, pools: PagePools, pulls: Pulls, transfers: Transfers, lease_s: float) -> None:
        self._pools = pools
        self._pulls = pulls
        self._transfers = transfers
        self._lease_s = lease_s
        self._stuck_since_s: float | None = None

    def coming(self, *, late: bool) -> int:
        """Return how many pages are free, or will be soon: when fences have passed, moves have ended and cancelled
        pulls have been reported. Pages that other engines have yet to pull are not counted. With `late`, the only moves
        whose end counts are cancelled pulls. The number is per KV group."""
        pools = self._pools
        coming = pools.coming_by_steps if late else pools.coming - self._kept()
        return coming + self._pulls.returning

    def reclaim_pages(self, lacking: int, sparing: Request | None = None) -> int:
        """Make `lacking` pages free soon, if possible: take back the pages of the latest requests that hold some
        without a slot, except `sparing`, then end the latest transfers whose requests have left. Returns how many pages
        per KV group that frees; they may be fewer or more."""
        freed = 0
        while freed < lacking and (request := self._pulls.newest_holder(sparing)):
            freed += self._pulls.reclaim_pages(request)
        while freed < lacking and (transfer := self._transfers.newest_prefill()):
            freed += self._pools.unheld(transfer.tables)
            self._transfers.reclaim_pages(transfer)
        return freed

    def reclaim_if_stuck(self, lacking: int, head: Request, now: float) -> None:
        """Note that the queue's head lacks pages and that nothing runs that could free them. When that has lasted for 1
        s, this call and each later one take `lacking` pages, less those that are coming anyway, back from pulls and
        transfers, but none from the head's own pull. A prefill-only head waits for the time of a lease, since ending
        earlier prefills for it would waste them."""
        patience_s = self._lease_s if head.prefill_only else PATIENCE_S
        if self._stuck_since_s is None:
            self._stuck_since_s = now
        elif now - self._stuck_since_s >= patience_s:
            self.reclaim_pages(lacking - (self.coming(late=True) - self._pools.free), sparing=head)

    def moved_on(self) -> None:
        """Note that the queue's head has the pages that it needs, or that something runs."""
        self._stuck_since_s = None

    def _kept(self) -> int:
        """Return how many pages are held only for other engines that have yet to pull them."""
        return sum(self._pools.unheld(transfer.tables) for transfer in self._transfers.finished_prefills())
