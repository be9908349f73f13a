"""Requests that wait: in the queue policy, for a lookup, or with a seat for a slot. Bounded by admission."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_scheduler.invariant import require
from quire_scheduler.request import Request, State

if TYPE_CHECKING:
    from quire_scheduler.queue_policy import QueuePolicy

_SWEEP = 64
# A lookup that takes longer is not waited for by those behind, while there are not too many.
_SLOW_S = 0.005
_MOST_LOOKING = 64


class WaitingRoom:
    """Three places, one after the other: policy (QUEUED), lookup (LOOKUP), seated (READY)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # With the time since when.
        self._looking: dict[int, tuple[Request, float]] = {}
        # Of these, who had a seat before.
        self._stood_up: set[int] = set()
        self._seated: list[tuple[int, Request]] = []
        self._num_seated = 0

    def __len__(self) -> int:
        return len(self.policy) + len(self._looking) + self._num_seated

    def ahead(self, now: float) -> int:
        """Requests that have left the policy and wait for a slot, without those whose lookup takes so long that others
        should go on meanwhile."""
        slow = 0
        if len(self._looking) < _MOST_LOOKING:
            slow = sum(now - since > _SLOW_S for _, since in self._looking.values())
        return len(self._looking) - slow + self._num_seated

    def push(self, request: Request) -> None:
        """A new request."""
        self.policy.push(request)

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
            require(self._seated[0][1] is request, "only the head goes back to its lookup")
            heapq.heappop(self._seated)
            self._num_seated -= 1
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
        """The request may start as soon as there is room; one that was preempted takes its old seat."""
        request.to(State.READY)
        heapq.heappush(self._seated, (request.order_key, request))
        self._num_seated += 1

    def head(self) -> Request | None:
        """The first of those seated."""
        while self._seated and self._seated[0][1].state is not State.READY:
            heapq.heappop(self._seated)
        return self._seated[0][1] if self._seated else None

    def start_head(self) -> Request:
        """Take the head out: it starts."""
        request = heapq.heappop(self._seated)[1]
        self._num_seated -= 1
        request.to(State.STARTED)
        return request

    def discard(self, request: Request) -> None:
        """A request that waits is gone; called before its state changes."""
        match request.state:
            case State.QUEUED:
                request.to(State.FINISHED)
                self.policy.discard(request)
            case State.LOOKUP:
                request.to(State.FINISHED)
                del self._looking[request.uid]
                self._stood_up.discard(request.uid)
            case State.READY:
                request.to(State.FINISHED)
                self._num_seated -= 1
                self._sweep()
            case _:
                raise AssertionError(f"{request.state.name} does not wait")

    def check_integrity(self) -> None:
        """Counts agree with what is inside."""
        require(self._num_seated == sum(r.state is State.READY for _, r in self._seated), "seats were miscounted")
        require(self._stood_up <= self._looking.keys(), "who has a seat is waited for")
        require(all(r.state is State.LOOKUP for r, _ in self._looking.values()), "a lookup of who does not wait for it")
        require(len(self.policy) >= 0, "the queue was miscounted")

    def _sweep(self) -> None:
        """Drop what has left, so that aborts cannot grow the heap."""
        if len(self._seated) > 2 * self._num_seated + _SWEEP:
            self._seated = [entry for entry in self._seated if entry[1].state is State.READY]
            heapq.heapify(self._seated)
