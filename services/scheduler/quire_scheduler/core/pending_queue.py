"""PendingQueue: the requests that have no slot. A request waits first in the queue policy, then for the answer to its
kvstore lookup, then for a slot. A request may also wait for a handover from a prefill replica, or for pages that
another engine sends.

RequestChecks limits how many requests wait. This module knows nothing of pages and slots.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from quire_common.errors import require
from quire_scheduler.core.request import Request, State

if TYPE_CHECKING:
    from quire_common.sequence import RequestContext
    from quire_scheduler.core.queue_policy import QueuePolicy

_SWEEP = 64
# Later requests do not wait for a lookup that takes longer than _SLOW_S, as long as fewer than _MOST_LOOKING requests
# are being looked up.
_SLOW_S = 0.005
_MOST_LOOKING = 64
_READY = (State.READY, State.PULLED)


class PendingQueue:
    """Each waiting request is in exactly one place, which its state names.

    QUEUED   in the queue policy, which decides which request is next
    LOOKUP   the kvstore was asked for its pages
    READY    it starts as soon as a slot and pages are free; it has its final order key
    PULLING  it holds pages, which another engine fills
    PULLED   it holds pages that will not be filled further, and starts as soon as a slot is free
    ASIDE    it does not hold up later requests: either parked outside the policy until a handover comes, or set aside
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # Requests in LOOKUP, by uid, with the time when the kvstore was asked.
        self._lookups: dict[int, tuple[Request, float]] = {}
        # Uids of the requests in LOOKUP that were READY before.
        self._looked_up_again: set[int] = set()
        self._ready: list[tuple[int, Request]] = []
        self._num_ready = 0
        self._holding: dict[int, Request] = {}
        # Requests that are ASIDE, by uid. Parked ones were never in the policy; the others were READY or PULLING.
        self._parked: dict[int, Request] = {}
        self._set_aside: dict[int, Request] = {}
        # `_tokens`: the number of prompt and output tokens of each request inside, by uid, as last counted.
        # `known_tokens`: their sum.
        self._tokens: dict[int, int] = {}
        self.known_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def deferred(self) -> int:
        """The number of requests that wait for something other than a slot and pages: a lookup, a handover, pages on
        their way, or, set aside, room among the requests that hold pages without a slot."""
        return len(self._lookups) + len(self._holding) + len(self._parked) + len(self._set_aside)

    def count_before_slot(self, now: float) -> int:
        """Return how many requests have left the policy and wait for a slot: those in LOOKUP, READY or PULLED. While
        fewer than 64 are in LOOKUP, those whose lookup has taken more than 5 ms are left out, so that others go on
        meanwhile."""
        slow = 0
        if 0 < len(self._lookups) < _MOST_LOOKING:
            slow = sum(now - since > _SLOW_S for _, since in self._lookups.values())
        return len(self._lookups) - slow + self._num_ready

    def requests_ahead(self, context: RequestContext) -> float:
        """Return about how many requests would start before a new one of this tenant and priority: all that have left
        the policy, and those that the policy estimates. Parked requests delay no other."""
        left_policy = len(self._lookups) + self._num_ready + len(self._holding) + len(self._set_aside)
        return left_policy + self.policy.requests_ahead(context)

    def tokens_of(self, uid: int) -> int:
        """Return how many of the `known_tokens` belong to the request; 0 if the request is not in the queue."""
        return self._tokens.get(uid, 0)

    def enter(self, request: Request, *, aside: bool) -> None:
        """Add a new request: to the queue policy or, with `aside`, to the parked requests. No other request waits for a
        parked one until `recall`."""
        self._count_tokens(request)
        if aside:
            request.move_to(State.ASIDE)
            self._parked[request.uid] = request
        else:
            self.policy.push(request)

    def recall(self, request: Request) -> None:
        """Return a request that is ASIDE to the queue: a parked one enters the policy, one that was set aside is READY
        again with its former order key."""
        if self._parked.pop(request.uid, None):
            self._count_tokens(request)  # a handover may have brought one
            request.move_to(State.QUEUED)
            self.policy.push(request)
        else:
            del self._set_aside[request.uid]
            self.make_ready(request)

    def next_queued(self, ahead: int, now: float) -> Request | None:
        """Remove and return the policy's next request, or None if it has none. Also None if `count_before_slot` is
        `ahead` or more, unless the policy knows the next request's order key, there is a READY or PULLED request, and
        the key is below all of theirs."""
        if self.count_before_slot(now) >= ahead:
            key, head = self.policy.next_key(), self.head()
            if key is None or head is None or key >= head.order_key:
                return None
        return self.policy.pop()

    def look_up(self, request: Request, now: float) -> None:
        """Move the request, which comes from the policy or is the first READY one, to LOOKUP, where it waits for the
        kvstore's answer. A READY one is noted, even if this is its first lookup, so that pages are kept back for it. No
        slot is kept: later requests may start meanwhile, and may take the last one."""
        if request.state is State.READY:
            self._remove_ready(request)
            self._looked_up_again.add(request.uid)
        request.move_to(State.LOOKUP)
        self._lookups[request.uid] = request, now

    def end_lookup(self, uid: int) -> Request | None:
        """Remove and return the request whose lookup the kvstore has answered; None if the request has left."""
        self._looked_up_again.discard(uid)
        request, _ = self._lookups.pop(uid, (None, 0.0))
        return request

    def tokens_of_repeated_lookups(self) -> list[int]:
        """Return the number of known tokens of each request in LOOKUP that was READY before."""
        return [self._lookups[uid][0].known_len for uid in self._looked_up_again]

    def make_ready(self, request: Request) -> None:
        """Put the request among those that may start: PULLED if it was PULLING, else READY. A preempted request keeps
        its order key, and a pulled one its pages."""
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
        """Remove and return the request that `head` has just returned. Its state becomes STARTED."""
        request = heapq.heappop(self._ready)[1]
        self._num_ready -= 1
        self._forget_tokens(request)
        request.move_to(State.STARTED)
        return request

    def hold(self, request: Request) -> None:
        """Move the head, which now holds pages, to PULLING, where it waits until another engine has filled them."""
        self._remove_ready(request)
        request.move_to(State.PULLING)
        self._holding[request.uid] = request

    def set_aside(self, request: Request) -> None:
        """Move a READY, PULLING or PULLED request, which holds no pages any more, to ASIDE, so that later requests go
        on until `recall`."""
        if self._holding.pop(request.uid, None) is None:
            self._remove_ready(request)
        request.move_to(State.ASIDE)
        self._set_aside[request.uid] = request

    def is_parked(self, request: Request) -> bool:
        """Whether the request is parked now: it is ASIDE, and was never in the policy."""
        return request.uid in self._parked

    def requests_set_aside(self) -> list[Request]:
        """Return the requests that were set aside, in the order of their keys."""
        if not self._set_aside:
            return []
        return sorted(self._set_aside.values(), key=lambda request: request.order_key)

    def discard(self, request: Request) -> None:
        """Remove a request that ends from its place in the queue, and set its state to FINISHED. Until this call, its
        state must still name the place. Raises AssertionError for a state that does not wait."""
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
        """Raise AssertionError if READY and PULLED requests are miscounted, if a request that is noted under LOOKUP,
        PULLING or ASIDE has another state, if a lookup is noted as repeated that is not under way, or if the token
        counts do not have one entry per waiting request and the right sum. The policy's requests and each request's own
        count are not checked."""
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
        places = len(self.policy) + len(self._lookups) + self._num_ready + len(self._holding) + len(aside)
        require(places == len(self), "the queue was miscounted")
        require(self.known_tokens == sum(self._tokens.values()), "waiting tokens were miscounted")

    def _count_tokens(self, request: Request) -> None:
        """Count the request's present tokens in place of those that were counted before."""
        tokens = request.known_len
        self.known_tokens += tokens - self._tokens.get(request.uid, 0)
        self._tokens[request.uid] = tokens

    def _forget_tokens(self, request: Request) -> None:
        self.known_tokens -= self._tokens.pop(request.uid, 0)

    def _remove_ready(self, request: Request) -> None:
        """Remove the request, usually the head, from the heap at once: it may come back, and must not be found
        twice."""
        if self._ready[0][1] is request:
            heapq.heappop(self._ready)
        else:
            self._ready = [entry for entry in self._ready if entry[1] is not request]
            heapq.heapify(self._ready)
        self._num_ready -= 1

    def _sweep(self) -> None:
        """Remove the heap's entries of requests that have left, so that aborts cannot make it grow without bound."""
        if len(self._ready) > 2 * self._num_ready + _SWEEP:
            self._ready = [entry for entry in self._ready if entry[1].state in _READY]
            heapq.heapify(self._ready)
