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
    """Pages that one core's pulls and transfers hold, and how long the queue's head has lacked pages."""

    def __init__(self, pools: PagePools, pulls: Pulls, transfers: Transfers, lease_s: float) -> None:
        self._pools = pools
        self._pulls = pulls
        self._transfers = transfers
        self._lease_s = lease_s
        self._stuck_since_s: float | None = None

    def coming(self, *, late: bool) -> int:
        """Return how many pages are free or will be soon, once fences pass, moves end and cancelled pulls are reported.
        Pages that wait for other engines to pull them do not count. `late`: nor do those that only the end of a move
        frees."""
        pools = self._pools
        coming = pools.coming_by_steps if late else pools.coming - self._kept()
        return coming + self._pulls.returning

    def give_back(self, lacking: int, sparing: Request | None = None) -> int:
        """Make `lacking` pages free soon, if possible: the latest pulling requests but `sparing` lose their pages, then
        the latest transfers end. Returns how many pages that frees."""
        freed = 0
        while freed < lacking and (request := self._pulls.newest_holder(sparing)):
            freed += self._pulls.give_back(request)
        while freed < lacking and (transfer := self._transfers.newest_prefill()):
            freed += self._pools.unheld(transfer.tables)
            self._transfers.give_back(transfer)
        return freed

    def unstick(self, lacking: int, head: Request, now: float) -> None:
        """Note that the queue's head lacks pages and nothing runs that could free them. When that has lasted too long,
        take pages back from pulls and transfers. A head that is prefilled for others waits as long as a lease, since
        ending earlier prefills for it would waste them."""
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
