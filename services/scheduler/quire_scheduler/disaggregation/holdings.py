"""Pages that are held without a slot, for requests that pull or for other engines: what comes of them under pressure.

Who runs goes before who does not: where pages lack, the latest of those that pull give theirs back, then the latest
transfers end. Knows nothing of slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_scheduler.core.request import Request
    from quire_scheduler.disaggregation.pulls import Pulls
    from quire_scheduler.disaggregation.transfers import Transfers
    from quire_scheduler.kv.page_pools import PagePools

# So long pages that others hold are waited for where nothing runs.
PATIENCE_S = 1.0


class Holdings:
    """One core's."""

    def __init__(self, pools: PagePools, pulls: Pulls, transfers: Transfers, lease_s: float) -> None:
        self._pools = pools
        self._pulls = pulls
        self._transfers = transfers
        self._lease_s = lease_s
        self._stuck_since_s: float | None = None

    def coming(self, *, late: bool) -> int:
        """Pages that are free or will be before long: once fences pass and moves end, but for those that wait for
        others to pull them. `late`: stores are not waited for."""
        pools = self._pools
        coming = pools.coming_by_steps if late else pools.coming - self._kept()
        return coming + self._pulls.returning

    def give_back(self, lacking: int, sparing: Request | None = None) -> int:
        """Free so many pages before long, if possible; returns how many."""
        freed = 0
        while freed < lacking and (request := self._pulls.newest_holder(sparing)):
            freed += self._pulls.give_back(request)
        while freed < lacking and (transfer := self._transfers.newest_prefill()):
            freed += self._pools.unheld(transfer.tables)
            self._transfers.give_back(transfer)
        return freed

    def unstick(self, lacking: int, head: Request, now: float) -> None:
        """The head of the queue lacks pages beside those that are free, and nothing runs that could free them.

        What is to be prefilled for others waits as long as a lease lasts: to throw away for it what was prefilled
        before is work for nothing.
        """
        patience_s = self._lease_s if head.prefill_only else PATIENCE_S
        if self._stuck_since_s is None:
            self._stuck_since_s = now
        elif now - self._stuck_since_s >= patience_s:
            self.give_back(lacking - (self.coming(late=True) - self._pools.free), sparing=head)

    def moved_on(self) -> None:
        """The head of the queue has what it needs, or something runs."""
        self._stuck_since_s = None

    def _kept(self) -> int:
        return sum(self._pools.unheld(transfer.tables) for transfer in self._transfers.finished_prefills())
