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
_SEATED = (State.READY, State.PULLED)


class WaitingRoom:
    """Places, one after the other: policy (QUEUED), lookup (LOOKUP), seated (READY). Beside them: aside (ASIDE), before
    the policy or instead of a seat; and holding (PULLING), between a seat without pages and one with (PULLED)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # With the time since when.
        self._looking: dict[int, tuple[Request, float]] = {}
        # Of these, who had a seat before.
        self._stood_up: set[int] = set()
        self._seated: list[tuple[int, Request]] = []
        self._num_seated = 0
        self._holding: dict[int, Request] = {}
        # Aside: who was not in the policy yet, and who left a seat.
        self._outside: dict[int, Request] = {}
        self._standing: dict[int, Request] = {}

    def __len__(self) -> int:
        beside = len(self._holding) + len(self._outside) + len(self._standing)
        return len(self.policy) + len(self._looking) + self._num_seated + beside

    def ahead(self, now: float) -> int:
        """Requests that have left the policy and wait for a slot, without those whose lookup takes so long that others
        should go on meanwhile."""
        slow = 0
        if 0 < len(self._looking) < _MOST_LOOKING:
            slow = sum(now - since > _SLOW_S for _, since in self._looking.values())
        return len(self._looking) - slow + self._num_seated

    def push(self, request: Request) -> None:
        """A new request."""
        self.policy.push(request)

    def stay_outside(self, request: Request) -> None:
        """A new request that nobody should wait for yet."""
        request.to(State.ASIDE)
        self._outside[request.uid] = request

    def recall(self, request: Request) -> None:
        """One that is aside takes its place: in the policy, or on the seat that it had."""
        if self._outside.pop(request.uid, None):
            request.to(State.QUEUED)
            self.policy.push(request)
        else:
            del self._standing[request.uid]
            self.seat(request)

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
            self._unseat(request)
            self._stood_up.add(request.uid)
        request.to(State.LOOKUP)
        self._looking[request.uid] = request, now

    def answered(self, uid: int) -> Request | None:
        """The answer came; None where the request has left."""
        self._stood_up.discard(uid)
        request, _ = self._looking.pop(uid, (None, 0.0))
        return request

    def stood_up(self) -> list[int]:
        """Known tokens of those who had a seat and wait for another answer now."""
        return [self._looking[uid][0].known_len for uid in self._stood_up]

    def seat(self, request: Request) -> None:
        """The request may start as soon as there is room; one that was preempted takes its old seat, one whose pages
        have come keeps them."""
        self._holding.pop(request.uid, None)
        request.to(State.PULLED if request.state is State.PULLING else State.READY)
        heapq.heappush(self._seated, (request.order_key, request))
        self._num_seated += 1

    def head(self) -> Request | None:
        """The first of those seated."""
        while self._seated and self._seated[0][1].state not in _SEATED:
            heapq.heappop(self._seated)
        return self._seated[0][1] if self._seated else None

    def start_head(self) -> Request:
        """Take the head out: it starts."""
        request = heapq.heappop(self._seated)[1]
        self._num_seated -= 1
        request.to(State.STARTED)
        return request

    def hold(self, request: Request) -> None:
        """The request, the head of those seated, has its pages and waits for what they are to hold."""
        self._unseat(request)
        request.to(State.PULLING)
        self._holding[request.uid] = request

    def stand_aside(self, request: Request) -> None:
        """The request, seated or holding, lets others go on until it is recalled. It holds no pages (any more)."""
        if self._holding.pop(request.uid, None) is None:
            self._unseat(request)
        request.to(State.ASIDE)
        self._standing[request.uid] = request

    def is_outside(self, request: Request) -> bool:
        """Whether it has never been in the policy."""
        return request.uid in self._outside

    def standing(self) -> list[Request]:
        """Those who left their seat, in the order of their seats."""
        return sorted(self._standing.values(), key=lambda request: request.order_key)

    def discard(self, request: Request) -> None:
        """A request that waits is gone; called before its state changes."""
        state = request.state
        request.to(State.FINISHED)
        match state:
            case State.QUEUED:
                self.policy.discard(request)
            case State.LOOKUP:
                del self._looking[request.uid]
                self._stood_up.discard(request.uid)
            case State.READY | State.PULLED:
                self._num_seated -= 1
                self._sweep()
            case State.PULLING:
                del self._holding[request.uid]
            case State.ASIDE:
                del (self._outside if request.uid in self._outside else self._standing)[request.uid]
            case _:
                raise AssertionError(f"{state.name} does not wait")

    def check_integrity(self) -> None:
        """Counts agree with what is inside."""
        require(self._num_seated == sum(r.state in _SEATED for _, r in self._seated), "seats were miscounted")
        require(self._stood_up <= self._looking.keys(), "who has a seat is waited for")
        require(all(r.state is State.LOOKUP for r, _ in self._looking.values()), "a lookup of who does not wait for it")
        require(all(r.state is State.PULLING for r in self._holding.values()), "who holds nothing is waited for")
        aside = [*self._outside.values(), *self._standing.values()]
        require(all(request.state is State.ASIDE for request in aside), "who is elsewhere stands aside")
        require(len(self.policy) >= 0, "the queue was miscounted")

    def _unseat(self, request: Request) -> None:
        """Take the request, usually the head, out at once: it may come back, and must not be found twice."""
        if self._seated[0][1] is request:
            heapq.heappop(self._seated)
        else:
            self._seated = [entry for entry in self._seated if entry[1] is not request]
            heapq.heapify(self._seated)
        self._num_seated -= 1

    def _sweep(self) -> None:
        """Drop what has left, so that aborts cannot grow the heap."""
        if len(self._seated) > 2 * self._num_seated + _SWEEP:
            self._seated = [entry for entry in self._seated if entry[1].state in _SEATED]
            heapq.heapify(self._seated)
