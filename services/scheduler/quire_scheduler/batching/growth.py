"""Growth: gives pages to running sequences. Pages are added ahead of need while there are enough; when they are short,
the oldest sequences get them first.

When pages run short, these measures follow each other until the pages suffice:

  1. sequences in standby slots (those that were started ahead of need, beyond the rows of a step) lose theirs
  2. all sequences get fewer pages ahead of need
  3. requests and transfers that hold pages without a slot lose theirs
  4. the latest running sequences are preempted

The oldest sequence always goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.columns import NO_I32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.sequence import RequestContext
    from quire_scheduler.batching.grant_policy import GrantPolicy
    from quire_scheduler.core.lifecycle import Lifecycle
    from quire_scheduler.core.replica import Replica
    from quire_scheduler.core.request import Request

_NO_SLOTS = np.empty(0, np.intp)


class Grown(NamedTuple):
    """The columns of a Grant: the slots that got pages and their new limits, then the pages by slot and KV group."""

    slot: NDArray[np.int32]
    limit: NDArray[np.int32]
    page_slot: NDArray[np.int32]
    page_group: NDArray[np.int32]
    page: NDArray[np.int32]


_NOTHING = Grown(NO_I32, NO_I32, NO_I32, NO_I32, NO_I32)


class Growth:
    """Grows the sequences for one Grant at a time: `plan_growth` gives them pages, then `take_growth` returns these
    pages as the columns of the Grant."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle, policy: GrantPolicy) -> None:
        self._replica = replica
        self._lifecycle = lifecycle
        self._policy = policy
        self._slot: NDArray[np.intp] = _NO_SLOTS
        self._count: NDArray[np.int32] = np.empty(0, np.int32)
        self._pages: list[list[int]] = [[] for _ in range(replica.pools.groups)]

    @property
    def has_untaken_pages(self) -> bool:
        """Whether some slots got pages that `take_growth` has not returned yet."""
        return len(self._slot) > 0

    def plan_growth(self, now: float) -> bool:
        """Give all slots new pages, if any slot has pages for less than its lead (the positions that it should be able
        to run ahead). Each gets its lead plus some slack while enough pages are free. If pages are short, leave out the
        slack, take back standby slots, halve all leads until the pages suffice, and last preempt the latest sequences
        for slots without a page for their next position. All of this happens at once: pages are allocated, capacities
        raised, tenants charged and sequences preempted. Only the columns for the Grant wait for `take_growth`. Returns
        False if the free pages were too few for the full lead before any slot was taken back; then no request may start
        with this Grant."""
        slots, pools = self._replica.slots, self._replica.pools
        if not slots.num_active:
            return True
        lead, extra = self._policy.lead(), self._policy.extra_lead() if slots.num_constrained else 0
        active = slots.active_slots()
        if not self._is_due(active, slots.reach(active, lead, extra)):
            return True
        missing = self._missing(active, slots.reach(active, lead + self._policy.slack(), extra))
        if int(missing.sum()) <= pools.free:
            self._give(active, missing)
            return True
        missing = self._missing(active, slots.reach(active, lead, extra))
        lacking = int(missing.sum())
        enough = lacking <= pools.free
        if not enough and self._reclaim(active, lacking, now):
            active = slots.active_slots()
            missing = self._missing(active, slots.reach(active, lead, extra))
        # All slots get the same share of their lead. If some slots got their whole lead, others would stand still for
        # want of pages that those do not need yet.
        while (lead or extra) and int(missing.sum()) > pools.free:
            lead, extra = lead // 2, extra // 2
            missing = self._missing(active, slots.reach(active, lead, extra))
        starving = self._give(active, missing)
        if len(starving):
            self._preempt(starving, now)
        return enough

    def take_growth(self) -> Grown:
        """Return the columns for the Grant, of the pages that slots got since the last call, and clear them."""
        if not self.has_untaken_pages:
            return _NOTHING
        slot, count, groups = self._slot.astype(np.int32), self._count, len(self._pages)
        grown = Grown(
            slot,
            self._replica.slots.capacity[slot],
            np.tile(np.repeat(slot, count), groups),
            np.repeat(np.arange(groups, dtype=np.int32), int(count.sum())),
            np.array([page for pages in self._pages for page in pages], np.int32),
        )
        self._slot, self._count, self._pages = _NO_SLOTS, self._count[:0], [[] for _ in self._pages]
        return grown

    def _is_due(self, active: NDArray[np.intp], reach: int | NDArray[np.int32]) -> bool:
        """Whether any of these slots has pages for fewer positions than `reach` past its known ones, or than its
        ceiling if that is lower."""
        slots = self._replica.slots
        wanted = np.minimum(slots.known_len[active] + reach, slots.ceiling[active])
        return bool(np.count_nonzero(wanted > slots.capacity[active]))

    def _missing(self, active: NDArray[np.intp], reach: int | NDArray[np.int32]) -> NDArray[np.int32]:
        return self._replica.slots.missing_pages(active, reach, self._replica.page_size)

    def _give(self, active: NDArray[np.intp], missing: NDArray[np.int32]) -> NDArray[np.intp]:
        """Allocate the `missing` pages of the active slots, lowest order key (the oldest) first, raise the slots'
        capacity, add the pages to the columns, and charge the tenants for the positions. Returns the slots that got
        none: the first one whose pages are not free, and all after it."""
        replica, slots = self._replica, self._replica.slots
        short = np.flatnonzero(missing)
        short = short[np.argsort(slots.order_key[active[short]])]
        fits = np.cumsum(missing[short]) <= replica.pools.free
        slot, count = active[short[fits]], missing[short[fits]]
        if len(slot):
            counts = count.tolist()
            requests = [slots.held(s) for s in slot.tolist()]
            given = replica.pools.give_each(requests, counts)
            self._pages = [[*before, *pages] for before, pages in zip(self._pages, given, strict=True)]
            self._slot, self._count = np.concatenate([self._slot, slot]), np.concatenate([self._count, count])
            slots.capacity[slot] += count * replica.page_size
            self._charge(requests, counts)
        return active[short[~fits]]

    def _charge(self, requests: list[Request], counts: list[int]) -> None:
        """Charge tenants for the pages of their requests (`counts`), in one call for all requests of a tenant with the
        same weight."""
        charged: dict[tuple[str, int], tuple[RequestContext, int]] = {}
        for request, pages in zip(requests, counts, strict=True):
            context = request.context
            key = context.tenant, context.weight
            charged[key] = context, pages + (charged[key][1] if key in charged else 0)
        for context, pages in charged.values():
            self._replica.waiting.policy.charge(context, pages * self._replica.page_size)

    def _reclaim(self, active: NDArray[np.intp], lacking: int, now: float) -> bool:
        """Preempt the latest sequences beyond the policy's `rows`, until `lacking` pages are free or will be. Only
        sequences that have sampled at most one token are preempted. Returns whether any was."""
        slots, pools = self._replica.slots, self._replica.pools
        excess = len(active) - self._policy.rows
        if excess <= 0:
            return False
        latest = active[np.argsort(slots.order_key[active])][: -excess - 1 : -1]
        # A standby sequence samples its first token with its prompt and then waits, so no more than that is lost.
        idle = latest[slots.known_len[latest] - slots.start_len[latest] <= 1]
        coming, taken = self._replica.holdings.coming(late=False), 0
        for slot in idle.tolist():
            if coming >= lacking:
                break
            request = slots.held(slot)
            coming += pools.freed_by(request)
            self._lifecycle.preempt(request, now, spare=True)
            taken += 1
        return taken > 0

    def _preempt(self, starving: NDArray[np.intp], now: float) -> None:
        """Make pages free for the starving slots, which have no page for their next position. Pages that are held
        without a slot are taken back first, and free pages are given at once. Then the latest sequences are preempted
        until enough pages are free or will be, but never the oldest. If stores of pages to the kvstore take too long,
        the preempted pages are not stored. If this Grant gives a preempted sequence pages, the worker ignores them."""
        slots, pools = self._replica.slots, self._replica.pools
        active = slots.active_slots()
        by_age = active[np.argsort(slots.order_key[active])].tolist()
        # Each starving slot needs one page, for its next position. If stores are late, nobody waits for them, and no
        # more pages are lent to them.
        late, holdings = self._replica.moves.are_late(now), self._replica.holdings
        coming = holdings.coming(late=late)
        coming += holdings.reclaim_pages(len(starving) - coming)
        # Some of these pages are free at once. They are given now, because maybe nothing happens later that causes
        # another Grant.
        hungry = self._give(starving, self._missing(starving, 0))
        needy, coming = set(hungry.tolist()), coming - (len(starving) - len(hungry))
        while len(needy) > coming and len(by_age) > 1:
            victim = by_age.pop()
            request = slots.held(victim)
            coming += pools.freed_by(request, lent=not late)
            needy.discard(victim)
            self._lifecycle.preempt(request, now, swaps=not late, stores=not late)
