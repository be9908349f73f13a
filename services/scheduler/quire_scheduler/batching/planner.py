"""Planner: makes the next Grant: page growth first (slots are taken back if pages run out), then starts, then moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.columns import NO_I32, NO_I64
from quire_common.credit import Grant
from quire_scheduler.batching.admission import Admission
from quire_scheduler.batching.growth import Growth

if TYPE_CHECKING:
    from quire_scheduler.batching.grant_policy import GrantPolicy
    from quire_scheduler.core.lifecycle import Lifecycle
    from quire_scheduler.core.replica import Replica


class Planner:
    """Plans one Grant at a time, and makes none that is not needed."""

    def __init__(self, replica: Replica, lifecycle: Lifecycle, policy: GrantPolicy) -> None:
        self._replica = replica
        self._policy = policy
        self._growth = Growth(replica, lifecycle, policy)
        self._admission = Admission(replica, policy)

    def plan_grant(self, now: float) -> Grant | None:
        """Let sequences grow, start requests, and return this with the moves and the slots to stop as the next Grant.
        All of it takes effect here: pages and slots are given, tenants are charged, and sequences may be preempted.
        Returns None where the policy allows no Grant now; then nothing is done. Also returns None where the Grant would
        change nothing and is not needed for its step; requests may have been looked up all the same. Stores of pages
        that will be evicted soon are begun first. A returned Grant counts as made: the policy is told, and its stops
        and moves are not planned again."""
        replica, policy, growth = self._replica, self._policy, self._growth
        if not policy.may_grant():
            return None
        replica.kv.tick(now)
        plenty = growth.plan_growth(now)
        starts = self._admission.plan_starts(now, may_start=plenty)
        changes = bool(starts or growth.has_untaken_pages or replica.stops or replica.moves.outgoing)
        if not changes and not (replica.slots.num_active and policy.worth_a_step()):
            return None
        grown, stops = growth.take_growth(), replica.stops
        moves, cancelled = replica.moves.take_moves(), replica.moves.take_cancelled()
        grant = Grant(
            replica.hello.epoch,
            replica.next_seq,
            stop_slot=np.array(stops, np.int32) if stops else NO_I32,
            stop_keep_pages=np.zeros(len(stops), np.int32) if stops else NO_I32,
            start=starts,
            limit_slot=grown.slot,
            limit_position=grown.limit,
            grow_slot=grown.page_slot,
            grow_group=grown.page_group,
            grow_page=grown.page,
            order_slot=NO_I32,
            move=moves,
            budget=policy.budget(),
            cancel_move=np.array(cancelled, np.int64) if cancelled else NO_I64,
        )
        policy.granted(grant.seq)
        replica.granted()
        return grant
