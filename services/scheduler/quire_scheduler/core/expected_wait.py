"""ExpectedWait: estimates, from measured times, how long a request that came now would wait for a slot.

Two resources are scarce: slots, and the worker's time to compute prompts. The wait for each is the work ahead of the
request divided by the measured speed, and the estimate is the longer of the two waits. A quantity that has not been
measured counts as no wait. The speeds are those of a worker that does nothing else, so the estimate tends to be too
low. It can only be too high, so that a request is refused without need, if the measured means are wrong.
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
    """Estimates waits at one replica that runs at most `rows` sequences at once. An estimate costs O(1) in the number
    of waiting requests, but O(n) in the number of their distinct priorities."""

    def __init__(self, rows: int, slots: SlotTable, waiting: PendingQueue, rates: Rates, cost: ResumeCost) -> None:
        self._rows = rows
        self._slots = slots
        self._waiting = waiting
        self._rates = rates
        self._cost = cost
        # Whether the lack of pages, not of slots, limits how many sequences run.
        self._page_bound = False

    def note_pages(self, *, lacking: bool) -> None:
        """Note whether the request at the queue's head lacks pages."""
        self._page_bound = lacking

    def wait_s(self, context: RequestContext) -> float:
        """Return the seconds until a request of this tenant and priority would have a slot and the worker's time: the
        longer of the two waits. 0.0 before anything was measured."""
        ahead = self._waiting.requests_ahead(context)
        return max(self._slot_wait_s(ahead), self._prefill_wait_s(ahead))

    def _slot_wait_s(self, ahead: float) -> float:
        """Return the seconds until a slot is free for a request with `ahead` requests before it. By Little's law, slots
        become free at the number of running sequences divided by the mean time of a sequence in its slot. As many
        sequences run as the replica has rows, or as hold slots, if these are more; while pages are lacking, only those
        in slots. If rows are free for it and all before it, the wait is 0."""
        started = self._slots.num_active
        running = started if self._page_bound and started else max(self._rows, started)
        to_leave = ahead + 1 - (running - started)
        return max(to_leave, 0.0) * self._rates.slot_s / running

    def _prefill_wait_s(self, ahead: float) -> float:
        """Return the seconds that the worker needs for the prompt tokens before the request: those still to be
        prefilled in slots, and an average share of the tokens of the `ahead` waiting requests, without cached ones."""
        tokens = float(self._slots.waiting_tokens())
        if ahead:
            mean = self._waiting.known_tokens / max(len(self._waiting), 1)
            tokens += ahead * mean * self._rates.computed_share
        return self._cost.prefill_s(tokens)
