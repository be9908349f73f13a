"""Makes the next Grant: growth first (preempting where pages run out), then starts, then what is left of moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Grant, Start
from quire_scheduler.outputs import AdmittedNote

if TYPE_CHECKING:
    from quire_scheduler.grant_policy import GrantPolicy
    from quire_scheduler.lifecycle import Lifecycle
    from quire_scheduler.replica import Replica
    from quire_scheduler.request import Request

# Requests that are looked up before a slot is free for them, so that a lookup's round trip leaves no slot idle.
_LOOK_AHEAD = 4


class Planner:
    """One Grant at a time. The oldest sequence always progresses: pages go to the lowest order key first, and the
    highest gives up its own.
    """

    def __init__(self, replica: Replica, lifecycle: Lifecycle, policy: GrantPolicy) -> None:
        self._replica = replica
        self._lifecycle = lifecycle
        self._policy = policy
        self._limits: list[int] = []
        self._grow_slot: list[int] = []
        self._grow_group: list[int] = []
        self._grow_page: list[int] = []

    def plan(self, now: float) -> Grant | None:
        """The next Grant; None where none may be sent, or none would change anything."""
        replica, policy = self._replica, self._policy
        if not policy.may_grant():
            return None
        self._seat(now)
        starts = [] if self._grow(now) else self._start(now)
        changes = bool(starts or self._limits or replica.stops or replica.kv.has_moves)
        if not changes and not (replica.slots.num_active and policy.worth_a_step()):
            return None
        grant = Grant(replica.hello.epoch, replica.next_seq, start=starts, budget=policy.budget())
        if replica.stops:
            grant.stop_slot = np.array(replica.stops, np.int32)
            grant.stop_keep_pages = np.zeros(len(replica.stops), np.int32)
            replica.stops = []
        if self._limits:
            self._put_growth(grant)
        grant.move = replica.kv.take_moves()
        policy.granted(grant.seq)
        replica.next_seq += 1
        replica.stats.grants += 1
        return grant

    def _seat(self, now: float) -> None:
        """Move requests on from the queue policy, so far ahead as slots are free."""
        waiting, kv = self._replica.waiting, self._replica.kv
        if not len(waiting.policy):
            return
        ahead = max(self._policy.most_started() - self._replica.slots.num_active, 1)
        ahead += _LOOK_AHEAD if kv.enabled else 0
        while request := waiting.next_queued(ahead):
            if kv.wants_lookup(request):
                waiting.look_up(request)
                kv.ask(request)
            else:
                waiting.seat(request)

    def _grow(self, now: float) -> bool:
        """Give pages to slots that reached the end of theirs; True while some slot starves."""
        slots = self._replica.slots
        active = slots.active_slots()
        known = slots.known_len[active]
        wanted = np.minimum(self._policy.target(known), slots.ceiling[active])
        short = wanted > slots.capacity[active]
        if not short.any():
            return False
        pools = self._replica.pools
        order = np.argsort(slots.order_key[active[short]])
        starving: list[tuple[Request, int]] = []
        rows = zip(
            active[short][order].tolist(), known[short][order].tolist(), wanted[short][order].tolist(), strict=True
        )
        for slot, must, may in rows:
            request = slots.holder[slot]
            assert request is not None
            held = len(request.tables[0])
            missing = max(pools.pages_for(must) - held, 0)
            count = min(pools.pages_for(may) - held, pools.free)
            if count < missing:
                starving.append((request, missing))
            elif count:
                self._extend(request, slot, count)
        if starving:
            self._preempt(starving, now)
        return bool(starving)

    def _extend(self, request: Request, slot: int, count: int) -> None:
        replica = self._replica
        for group, pages in enumerate(replica.pools.give(request, count)):
            self._grow_slot += [slot] * count
            self._grow_group += [group] * count
            self._grow_page += pages
        replica.slots.capacity[slot] += count * replica.page_size
        replica.waiting.policy.charge(request.context.tenant, count * replica.page_size)
        self._limits.append(slot)

    def _preempt(self, starving: list[tuple[Request, int]], now: float) -> None:
        """Stop the latest until enough pages will come back for the rest; never the oldest.

        Growth that this Grant gives to a victim does no harm: the worker ignores it for a slot that it stops.
        """
        replica = self._replica
        needs = {request.uid: missing for request, missing in starving}
        coming = replica.pools.coming
        held = (slot for slot in replica.slots.active_slots().tolist())
        by_age = sorted((r for s in held if (r := replica.slots.holder[s])), key=lambda r: r.order_key)
        while sum(needs.values()) > coming and len(by_age) > 1:
            victim = by_age.pop()
            coming += replica.pools.freed_by(victim)
            needs.pop(victim.uid, None)
            self._lifecycle.preempt(victim, now)

    def _start(self, now: float) -> list[Start]:
        """Start those seated, in order, while slots and pages last; none overtakes the head, lest it starve."""
        replica, starts = self._replica, list[Start]()
        slots, pools, waiting = replica.slots, replica.pools, replica.waiting
        most = min(self._policy.most_started(), slots.num_slots)
        while slots.num_active < most and slots.num_free and (request := waiting.head()):
            if replica.kv.expired(request, now):
                replica.kv.abandon(request)
                waiting.look_up(request)
                replica.kv.ask(request)
                continue
            known = request.known_len
            ceiling = self._ceiling(request)
            target = min(int(self._policy.target(np.array([known], np.int32))[0]), ceiling)
            # A page in hand for each that runs, so that a start does not at once preempt.
            spare = pools.free - slots.num_active
            count = min(pools.pages_for(max(target, known)), max(spare, pools.pages_for(known)))
            if count > (spare if slots.num_active else pools.free):
                break
            starts.append(self._begin(waiting.start_head(), count, ceiling, now))
        return starts

    def _begin(self, request: Request, count: int, ceiling: int, now: float) -> Start:
        replica = self._replica
        replica.pools.give(request, count)
        replica.kv.load(request)
        capacity = count * replica.page_size
        slot = replica.slots.take(request, replica.next_seq, ceiling, capacity)
        request.timing.started(now)
        if not request.admitted:
            request.admitted = True
            note = AdmittedNote(request.handle, request.context.attempt, request.cached_tokens)
            replica.outputs.admitted(request.session, note)
            replica.stats.prompt_tokens += request.prompt_len
            replica.stats.cached_tokens += request.cached_tokens
        return Start(
            slot=slot,
            order_key=request.order_key,
            sequence=request.resumed_sequence(),
            cached_len=request.cached_tokens,
            pages=tuple(np.array(table, np.int32) for table in request.tables),
            limit=capacity,
            context=request.context,
            max_model_len=replica.admission.max_len,
        )

    def _ceiling(self, request: Request) -> int:
        """Positions that may ever be computed: the last token's KV is never needed."""
        longest = request.prompt_len + request.sequence.stop.max_tokens
        return min(longest, self._replica.admission.max_len) - 1

    def _put_growth(self, grant: Grant) -> None:
        grant.limit_slot = np.array(self._limits, np.int32)
        grant.limit_position = self._replica.slots.capacity[grant.limit_slot]
        grant.grow_slot = np.array(self._grow_slot, np.int32)
        grant.grow_group = np.array(self._grow_group, np.int32)
        grant.grow_page = np.array(self._grow_page, np.int32)
        self._limits, self._grow_slot, self._grow_group, self._grow_page = [], [], [], []
