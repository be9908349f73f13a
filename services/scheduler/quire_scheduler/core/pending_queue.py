"""PendingQueue: requests without a slot. A request waits in the queue policy, then for the kvstore's lookup, then for a
slot; beside that, for a handover from a prefill replica or for pages that another engine sends.

RequestChecks bounds how many requests wait. This module knows nothing of pages and slots."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_common.errors import require
from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.queue_policy import QueuePolicy

_SWEEP = 64
# A lookup that takes longer is not waited for by those behind, while there are not too many.
_SLOW_S = 0.005
_MOST_LOOKING = 64
_READY = (State.READY, State.PULLED)


class PendingQueue:
    """Each request is in one place, which its state names.

    QUEUED   in the queue policy, which decides who is next
    LOOKUP   the kvstore was asked for its pages
    READY    it starts as soon as a slot and pages are free; it has its final order key
    PULLING  it holds pages, which another engine fills
    PULLED   it holds pages that will not be filled further, and starts as soon as a slot is free
    ASIDE    parked before the policy until a handover comes, or set aside so that later requests can go on
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # By uid, with the time when the kvstore was asked.
        self._lookups: dict[int, tuple[Request, float]] = {}
        # Requests among these that were READY before.
        self._looked_up_again: set[int] = set()
        self._ready: list[tuple[int, Request]] = []
        self._num_ready = 0
        self._holding: dict[int, Request] = {}
        # ASIDE, by uid: requests that were never in the policy, and requests that were READY or PULLING.
        self._parked: dict[int, Request] = {}
        self._set_aside: dict[int, Request] = {}
        # Prompt and output tokens of all requests inside, by uid, as they were on arrival; and their sum.
        self._tokens: dict[int, int] = {}
        self.known_tokens = 0

    def __len__(self) -> int:
        beside = len(self._holding) + len(self._parked) + len(self._set_aside)
        return len(self.policy) + len(self._lookups) + self._num_ready + beside

    @property
    def deferred(self) -> int:
        """How many wait for something other than a slot and pages: a lookup, a handover, or pages on their way."""
        return len(self._lookups) + len(self._holding) + len(self._parked) + len(self._set_aside)

    def ahead(self, now: float) -> int:
        """Return how many requests have left the policy and wait for a slot, without those whose lookup takes so long
        that others should go on meanwhile."""
        slow = 0
        if 0 < len(self._lookups) < _MOST_LOOKING:
            slow = sum(now - since > _SLOW_S for _, since in self._lookups.values())
        return len(self._lookups) - slow + self._num_ready

    def requests_ahead(self, context: RequestContext) -> float:
        """Return about how many requests would go before a new one of this tenant and priority. Those that are parked
        delay no other."""
        return len(self) - len(self.policy) - len(self._parked) + self.policy.requests_ahead(context)

    def tokens_of(self, uid: int) -> int:
        """Return the tokens that the request counts among `known_tokens`; 0 where it is not inside."""
        return self._tokens.get(uid, 0)

    def enter(self, request: Request, *, aside: bool) -> None:
        """Add a new request: to the queue policy or, with `aside`, to the parked ones, for which no other request waits
        until `recall`."""
        self._count_tokens(request)
        if aside:
            request.move_to(State.ASIDE)
            self._parked[request.uid] = request
        else:
            self.policy.push(request)

    def recall(self, request: Request) -> None:
        """Return a request that is ASIDE: one that was parked enters the policy, one that was set aside is READY again
        with the order key that it had."""
        if self._parked.pop(request.uid, None):
            self._count_tokens(request)  # a handover may have brought one
            request.move_to(State.QUEUED)
            self.policy.push(request)
        else:
            del self._set_aside[request.uid]
            self.make_ready(request)

    def next_queued(self, ahead: int, now: float) -> Request | None:
        """Remove and return the policy's next request, if fewer than `ahead` requests are ahead of it or it precedes
        every READY request; else None."""
        if self.ahead(now) >= ahead:
            key, head = self.policy.next_key(), self.head()
            if key is None or head is None or key >= head.order_key:
                return None
        return self.policy.pop()

    def look_up(self, request: Request, now: float) -> None:
        """Move the request, from the policy or the first of the READY ones, to LOOKUP, where it waits for the kvstore's
        answer."""
        if request.state is State.READY:
            self._remove_ready(request)
            self._looked_up_again.add(request.uid)
        request.move_to(State.LOOKUP)
        self._lookups[request.uid] = request, now

    def end_lookup(self, uid: int) -> Request | None:
        """Take the request out of LOOKUP, since the kvstore has answered; None if the request has left."""
        self._looked_up_again.discard(uid)
        request, _ = self._lookups.pop(uid, (None, 0.0))
        return request

    def tokens_of_repeated_lookups(self) -> list[int]:
        """Number of known tokens of each request that was READY and is looked up again."""
        return [self._lookups[uid][0].known_len for uid in self._looked_up_again]

    def make_ready(self, request: Request) -> None:
        """Put the request among those that may start as soon as there is room: READY, or PULLED if it was PULLING. A
        preempted request keeps its order key, a pulled one its pages."""
        self._holding.pop(request.uid, None)
        self._count_tokens(request)
        request.move_to(State.PULLED if request.state is State.PULLING else State.READY)
        heapq.heappush(self._ready, (request.order_key, request))
        self._num_ready += 1

    def head(self) -> Request | None:
        """Return the READY or PULLED request with the lowest order key, without removing it; None if there is none."""
        while self._ready and self._ready[0][1].state not in _READY:
            heapq.heappop(self._ready)
        return self._ready[0][1] if self._ready else None

    def pop_head(self) -> Request:
        """Remove and return the head, whose state becomes STARTED."""
        request = heapq.heappop(self._ready)[1]
        self._num_ready -= 1
        self._forget_tokens(request)
        request.move_to(State.STARTED)
        return request

    def hold(self, request: Request) -> None:
        """Move the head, which holds pages now, to PULLING, where it waits until another engine has filled them."""
        self._remove_ready(request)
        request.move_to(State.PULLING)
        self._holding[request.uid] = request

    def set_aside(self, request: Request) -> None:
        """Move a READY or PULLING request, which holds no pages, to ASIDE, so that later ones go on until `recall`."""
        if self._holding.pop(request.uid, None) is None:
            self._remove_ready(request)
        request.move_to(State.ASIDE)
        self._set_aside[request.uid] = request

    def is_parked(self, request: Request) -> bool:
        """Whether the request has never been in the policy."""
        return request.uid in self._parked

    def requests_set_aside(self) -> list[Request]:
        """Requests that were set aside, in the order of their keys."""
        return sorted(self._set_aside.values(), key=lambda request: request.order_key)

    def discard(self, request: Request) -> None:
        """Remove a request that ends from the place where it waits, and set its state to FINISHED. Called while its
        state still names that place."""
        state = request.state
        self._forget_tokens(request)
        request.move_to(State.FINISHED)
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
        """Raise AssertionError where counts and states disagree with the requests inside."""
        require(self._num_ready == sum(r.state in _READY for _, r in self._ready), "READY requests were miscounted")
        require(
            self._looked_up_again <= self._lookups.keys(), "a request that is READY is still awaited from the kvstore"
        )
        require(
            all(r.state is State.LOOKUP for r, _ in self._lookups.values()),
            "a lookup for a request that does not wait for it",
        )
        require(
            all(r.state is State.PULLING for r in self._holding.values()), "a request without pages counts as PULLING"
        )
        aside = [*self._parked.values(), *self._set_aside.values()]
        require(all(request.state is State.ASIDE for request in aside), "a request is aside and elsewhere")
        require(len(self.policy) >= 0, "the queue was miscounted")
        require(len(self._tokens) == len(self), "the tokens of a request are counted that is not inside")
        require(self.known_tokens == sum(self._tokens.values()), "waiting tokens were miscounted")

    def _count_tokens(self, request: Request) -> None:
        """Count the request's tokens as they are now, instead of those that were counted before."""
        self._forget_tokens(request)
        self._tokens[request.uid] = request.known_len
        self.known_tokens += request.known_len

    def _forget_tokens(self, request: Request) -> None:
        self.known_tokens -= self._tokens.pop(request.uid, 0)

    def _remove_ready(self, request: Request) -> None:
        """Remove the request, usually the head, at once: it may come back and must not be found twice."""
        if self._ready[0][1] is request:
            heapq.heappop(self._ready)
        else:
            self._ready = [entry for entry in self._ready if entry[1] is not request]
            heapq.heapify(self._ready)
        self._num_ready -= 1

    def _sweep(self) -> None:
        """Drop requests that have left, so that aborts cannot grow the heap."""
        if len(self._ready) > 2 * self._num_ready + _SWEEP:
            self._ready = [entry for entry in self._ready if entry[1].state in _READY]
            heapq.heapify(self._ready)
