"""Requests that wait: outside, in the queue policy, for a lookup, with a seat for a slot, or with pages that are on
their way. Bounded by admission."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_scheduler.core.invariant import require
from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from quire_scheduler.core.queue_policy import QueuePolicy

_SWEEP = 64
# A lookup that takes longer is not waited for by those behind, while there are not too many.
_SLOW_S = 0.005
_MOST_LOOKING = 64
_READY = (State.READY, State.PULLED)


class PendingQueue:
    """Places, one after the other: policy (QUEUED), lookup (LOOKUP), seated (READY). Beside them: aside (ASIDE), before
    the policy or instead of a seat; and holding (PULLING), between a seat without pages and one with (PULLED)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # With the time since when.
        self._lookups: dict[int, tuple[Request, float]] = {}
        # Of these, who had a seat before.
        self._looked_up_again: set[int] = set()
        self._ready: list[tuple[int, Request]] = []
        self._num_ready = 0
        self._holding: dict[int, Request] = {}
        # Aside: who was not in the policy yet, and who left a seat.
        self._parked: dict[int, Request] = {}
        self._set_aside: dict[int, Request] = {}

    def __len__(self) -> int:
        beside = len(self._holding) + len(self._parked) + len(self._set_aside)
        return len(self.policy) + len(self._lookups) + self._num_ready + beside

    def ahead(self, now: float) -> int:
        """Requests that have left the policy and wait for a slot, without those whose lookup takes so long that others
        should go on meanwhile."""
        slow = 0
        if 0 < len(self._lookups) < _MOST_LOOKING:
            slow = sum(now - since > _SLOW_S for _, since in self._lookups.values())
        return len(self._lookups) - slow + self._num_ready

    def push(self, request: Request) -> None:
        """A new request."""
        self.policy.push(request)

    def park(self, request: Request) -> None:
        """A new request that nobody should wait for yet."""
        request.to(State.ASIDE)
        self._parked[request.uid] = request

    def recall(self, request: Request) -> None:
        """One that is aside takes its place: in the policy, or on the seat that it had."""
        if self._parked.pop(request.uid, None):
            request.to(State.QUEUED)
            self.policy.push(request)
        else:
            del self._set_aside[request.uid]
            self.make_ready(request)

    def next_queued(self, ahead: int, now: float) -> Request | None:
        """Hand out the policy's next, while fewer than `ahead` are ahead of it or it goes before those seated."""
        if self.ahead(now) >= ahead:
            key, head = self.policy.next_key(), self.head()
            if key is None or head is None or key >= head.order_key:
                return None
        return self.policy.pop()

    def look_up(self, request: Request, now: float) -> None:
        """The request, out of the policy or the head of those seated, waits for the kvstore's answer."""
        if request.state is State.READY:
            self._remove_ready(request)
            self._looked_up_again.add(request.uid)
        request.to(State.LOOKUP)
        self._lookups[request.uid] = request, now

    def answered(self, uid: int) -> Request | None:
        """The answer came; None where the request has left."""
        self._looked_up_again.discard(uid)
        request, _ = self._lookups.pop(uid, (None, 0.0))
        return request

    def tokens_of_repeated_lookups(self) -> list[int]:
        """Known tokens of those who had a seat and wait for another answer now."""
        return [self._lookups[uid][0].known_len for uid in self._looked_up_again]

    def make_ready(self, request: Request) -> None:
        """The request may start as soon as there is room; one that was preempted takes its old seat, one whose pages
        have come keeps them."""
        self._holding.pop(request.uid, None)
        request.to(State.PULLED if request.state is State.PULLING else State.READY)
        heapq.heappush(self._ready, (request.order_key, request))
        self._num_ready += 1

    def head(self) -> Request | None:
        """The first of those seated."""
        while self._ready and self._ready[0][1].state not in _READY:
            heapq.heappop(self._ready)
        return self._ready[0][1] if self._ready else None

    def pop_head(self) -> Request:
        """Take the head out: it starts."""
        request = heapq.heappop(self._ready)[1]
        self._num_ready -= 1
        request.to(State.STARTED)
        return request

    def hold(self, request: Request) -> None:
        """The request, the head of those seated, has its pages and waits for what they are to hold."""
        self._remove_ready(request)
        request.to(State.PULLING)
        self._holding[request.uid] = request

    def set_aside(self, request: Request) -> None:
        """The request, seated or holding, lets others go on until it is recalled. It holds no pages (any more)."""
        if self._holding.pop(request.uid, None) is None:
            self._remove_ready(request)
        request.to(State.ASIDE)
        self._set_aside[request.uid] = request

    def is_parked(self, request: Request) -> bool:
        """Whether it has never been in the policy."""
        return request.uid in self._parked

    def requests_set_aside(self) -> list[Request]:
        """Those who left their seat, in the order of their seats."""
        return sorted(self._set_aside.values(), key=lambda request: request.order_key)

    def discard(self, request: Request) -> None:
        """A request that waits is gone; called before its state changes."""
        state = request.state
        request.to(State.FINISHED)
        match state:
            case State.QUEUED:
                self.policy.discard(request)
            case State.LOOKUP:
                del self._lookups[request.uid]
                self._looked_up_again.discard(request.uid)
            case State.READY | State.PULLED:
                self._num_ready -= 1
                self._sweep()
            case State.PULLING:
                del self._holding[request.uid]
            case State.ASIDE:
                del (self._parked if request.uid in self._parked else self._set_aside)[request.uid]
            case _:
                raise AssertionError(f"{state.name} does not wait")

    def check_integrity(self) -> None:
        """Counts agree with what is inside."""
        require(self._num_ready == sum(r.state in _READY for _, r in self._ready), "seats were miscounted")
        require(self._looked_up_again <= self._lookups.keys(), "who has a seat is waited for")
        require(all(r.state is State.LOOKUP for r, _ in self._lookups.values()), "a lookup of who does not wait for it")
        require(all(r.state is State.PULLING for r in self._holding.values()), "who holds nothing is waited for")
        aside = [*self._parked.values(), *self._set_aside.values()]
        require(all(request.state is State.ASIDE for request in aside), "who is elsewhere stands aside")
        require(len(self.policy) >= 0, "the queue was miscounted")

    def _remove_ready(self, request: Request) -> None:
        """Take the request, usually the head, out at once: it may come back, and must not be found twice."""
        if self._ready[0][1] is request:
            heapq.heappop(self._ready)
        else:
            self._ready = [entry for entry in self._ready if entry[1] is not request]
            heapq.heapify(self._ready)
        self._num_ready -= 1

    def _sweep(self) -> None:
        """Drop what has left, so that aborts cannot grow the heap."""
        if len(self._ready) > 2 * self._num_ready + _SWEEP:
            self._ready = [entry for entry in self._ready if entry[1].state in _READY]
            heapq.heapify(self._ready)
