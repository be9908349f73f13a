"""How long a request that came now would wait for a slot, from measured times.

Two resources are scarce: slots, and the worker's time for prompts. The wait for each is the work ahead divided by the
measured speed, and the longer one counts. What was not measured yet counts as no wait, and speeds are those of a worker
that does nothing else: a request is never refused for an estimate that is too high by more than the measured means err.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.batching.slot_table import SlotTable
    from quire_scheduler.core.pending_queue import PendingQueue
    from quire_scheduler.core.stats import Rates
    from quire_scheduler.kv.resume_cost import ResumeCost


class ExpectedWait:
    """Expects waits at one replica, which runs `rows` sequences at once. An answer costs O(1) in the number of waiting
    requests, but O(n) in their distinct priorities."""

    def __init__(self, rows: int, slots: SlotTable, waiting: PendingQueue, rates: Rates, cost: ResumeCost) -> None:
        self._rows = rows
        self._slots = slots
        self._waiting = waiting
        self._rates = rates
        self._cost = cost
        # Whether pages, not slots, bound how many sequences run.
        self._page_bound = False

    def note_pages(self, *, lacking: bool) -> None:
        """Note whether the request at the queue's head lacks pages."""
        self._page_bound = lacking

    def wait_s(self, context: RequestContext) -> float:
        """Return the seconds until a request of this tenant and priority would have a slot and the worker's time; 0.0
        where nothing was measured yet."""
        ahead = self._waiting.requests_ahead(context)
        return max(self._slot_wait_s(ahead), self._prefill_wait_s(ahead))

    def _slot_wait_s(self, ahead: float) -> float:
        """Return the time until a slot is free, with `ahead` requests before. By Little's law, slots become free at the
        rate of sequences that run, divided by the mean time of one in its slot."""
        started = self._slots.num_active
        running = started if self._page_bound and started else max(self._rows, started)
        to_leave = ahead + 1 - (running - started)
        return max(to_leave, 0.0) * self._rates.slot_s / running

    def _prefill_wait_s(self, ahead: float) -> float:
        """Return the time to compute what is not cached of the prompts before."""
        tokens = float(self._slots.waiting_tokens())
        if ahead:
            mean = self._waiting.known_tokens / max(len(self._waiting), 1)
            tokens += ahead * mean * self._rates.computed_share
        return self._cost.prefill_s(tokens)
