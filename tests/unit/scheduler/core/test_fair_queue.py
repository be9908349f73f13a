"""Weighted fair queueing: shares within bounds, nobody starves, whatever tenants and requests there are."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.sequence import MAX_WEIGHT, RequestContext, Sequence, Stop, context_from_pb, context_to_pb
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.queue_policy import FairQueue
from quire_scheduler.core.request import Request, State
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.tiers import examples


class Kind(NamedTuple):
    """A tenant's requests: prompt and answer of each, drawn from these in turn."""

    weight: int
    sizes: list[tuple[int, int]]


kinds = st.lists(
    st.builds(
        Kind,
        weight=st.integers(1, 8),
        sizes=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=4),
    ),
    min_size=2,
    max_size=6,
)


class Feed:
    """Gives requests of each tenant, and counts the tokens that were served of each."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.kinds = kinds
        self.queue = FairQueue()
        self.served: dict[str, int] = defaultdict(int)
        self._uid = 0
        self._given: dict[int, int] = defaultdict(int)

    def push(self, tenant: int, priority: int = 0) -> Request:
        kind = self.kinds[tenant]
        prompt, answer = kind.sizes[self._given[tenant] % len(kind.sizes)]
        self._given[tenant] += 1
        self._uid += 1
        context = RequestContext(f"r{self._uid}", tenant=str(tenant), priority=priority, weight=kind.weight)
        sequence = Sequence(np.zeros(prompt, np.int32), Stop(max(answer, 1)))
        one = Request.new(self._uid, 0, self._uid, context, sequence, 0.0)
        self.queue.push(one)
        return one

    def pop(self) -> int:
        """Serve the next request at once; return its tenant."""
        one = self.queue.pop()
        assert one is not None
        one.move_to(State.READY)
        answer = one.sequence.stop.max_tokens
        self.queue.charge(one.context, answer)
        self.served[one.context.tenant] += one.prompt_len + answer
        return int(one.context.tenant)

    def most(self, tenant: int) -> int:
        """Tokens of the tenant's largest request."""
        return max(prompt + max(answer, 1) for prompt, answer in self.kinds[tenant].sizes)


@examples(100)
@given(kinds=kinds, turns=st.integers(10, 200))
def test_tenants_that_always_wait_are_served_by_their_weights(kinds: list[Kind], turns: int) -> None:
    feed = Feed(kinds)
    for tenant in range(len(kinds)):
        feed.push(tenant)
        feed.push(tenant)
    for _ in range(turns):
        # Each always has a request waiting.
        feed.push(feed.pop())
        share = [feed.served[str(t)] / kind.weight for t, kind in enumerate(kinds)]
        bound = [feed.most(t) / kind.weight for t, kind in enumerate(kinds)]
        for a in range(len(kinds)):
            for b in range(len(kinds)):
                assert share[a] - share[b] <= max(bound[a], bound[b]) + 1e-6


@examples(100)
@given(kinds=kinds, before=st.integers(0, 100), late=st.integers(0, 5))
def test_a_newcomer_is_served_after_a_bounded_amount_whatever_waits(kinds: list[Kind], before: int, late: int) -> None:
    late %= len(kinds)
    feed = Feed(kinds)
    others = [t for t in range(len(kinds)) if t != late]
    for tenant in others:
        for _ in range(50):
            feed.push(tenant)
    for _ in range(before):
        feed.push(feed.pop())
    feed.push(late)
    start = dict(feed.served)
    while (tenant := feed.pop()) != late:
        feed.push(tenant)
    for other in others:
        # No more than one request, for any weight: the newcomer begins at the least counter.
        assert feed.served[str(other)] - start.get(str(other), 0) <= feed.most(other)


@examples(100)
@given(kinds=kinds, turns=st.integers(1, 100), later=st.integers(1, 100))
def test_nobody_starves_however_late_a_request_comes_back(kinds: list[Kind], turns: int, later: int) -> None:
    """A tenant that took much and left is served when the others have had as much, and no later."""
    feed = Feed(kinds)
    for _ in range(turns):
        feed.push(0)
        feed.pop()
    for tenant in range(1, len(kinds)):
        for _ in range(20):
            feed.push(tenant)
    feed.push(0)
    ahead = feed.served["0"] / kinds[0].weight
    start = dict(feed.served)
    while (tenant := feed.pop()) != 0:
        feed.push(tenant)
    for other in range(1, len(kinds)):
        got = (feed.served[str(other)] - start.get(str(other), 0)) / kinds[other].weight
        assert got <= ahead + feed.most(other) / kinds[other].weight + 1e-6


def test_a_newcomer_to_an_empty_queue_begins_beside_the_tenant_served_last() -> None:
    feed = Feed([Kind(1, [(1000, 5000)]), Kind(1, [(10, 1)])])
    feed.push(0)
    feed.pop()
    for _ in range(3):
        feed.push(1)
    feed.push(0)
    assert [feed.pop() for _ in range(2)] == [0, 1], "6000 tokens of the first tenant are no credit of the second"


class Naive:
    """The algorithm of the paper, word for word: all counters are compared at each step."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Request]] = {}
        self.served: dict[str, float] = {}
        self.seen: dict[str, int] = {}
        self.last = ""

    @property
    def floor(self) -> float:
        return self.served.get(self.last, 0.0)

    def push(self, one: Request) -> None:
        name = one.context.tenant
        self.seen.setdefault(name, len(self.seen))
        if name not in self.waiting:
            least = min((self.served[other] for other in self.waiting), default=self.floor)
            self.served[name] = max(self.served.get(name, 0.0), least)
            self.waiting[name] = []
        self.waiting[name].append(one)

    def remove(self, one: Request) -> None:
        name = one.context.tenant
        self.waiting[name].remove(one)
        if not self.waiting[name]:
            del self.waiting[name]

    def next(self) -> Request | None:
        if not self.waiting:
            return None
        name = min(self.waiting, key=lambda name: (self.served[name], self.seen[name]))
        one = min(self.waiting[name], key=lambda r: (r.context.priority, r.uid))
        self.remove(one)
        self.last = name
        self.charge(one, one.prompt_len)
        return one

    def charge(self, one: Request, tokens: int) -> None:
        self.served[one.context.tenant] = self.served.get(one.context.tenant, self.floor) + tokens / one.context.weight


actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 4), st.integers(-2, 2)),
        st.tuples(st.just("pop"), st.integers(0, 300), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 50), st.just(0)),
    ),
    max_size=120,
)


@examples(200)
@given(actions=actions)
def test_order_is_that_of_the_algorithm_without_a_heap(actions: list[tuple[str, int, int]]) -> None:
    feed = Feed([Kind(1 + t, [(10 * (t + 1), 1), (7, 1)]) for t in range(5)])
    naive, inside = Naive(), list[Request]()
    for what, number, priority in actions:
        if what == "push":
            inside.append(feed.push(number, priority))
            naive.push(inside[-1])
        elif what == "pop":
            got, wanted = feed.queue.pop(), naive.next()
            assert got is wanted
            if got is not None:
                got.move_to(State.READY)
                inside.remove(got)
                feed.queue.charge(got.context, number)
                naive.charge(got, number)
        elif inside:
            one = inside.pop(number % len(inside))
            naive.remove(one)
            one.move_to(State.FINISHED)
            feed.queue.discard(one)
        assert len(feed.queue) == len(inside)


def test_a_lone_tenant_gets_nearly_all_places_and_leaves_some() -> None:
    feed = Feed([Kind(1, [(10, 1)]), Kind(1, [(10, 1)])])
    held = filled(feed, 0, 1024)
    assert held == math.ceil(1024 * 8 / 9)
    assert filled(feed, 1, 1024) > 100, "a newcomer finds room beside a flood"


def test_a_place_that_becomes_free_is_not_for_those_who_flood() -> None:
    feed = Feed([Kind(1, [(10, 1)]) for _ in range(11)])
    for tenant in range(10):
        filled(feed, tenant, 1024)
    feed.pop()
    assert not feed.queue.room(RequestContext("r", tenant="0"), 1), "it holds hundreds of places"
    assert filled(feed, 10, 1024) > 0


def filled(feed: Feed, tenant: int, places: int) -> int:
    """Push requests of the tenant while there is room; return how many."""
    held, context = 0, RequestContext("r", tenant=str(tenant), weight=feed.kinds[tenant].weight)
    while (free := places - len(feed.queue)) > 0 and feed.queue.room(context, free):
        feed.push(tenant)
        held += 1
    return held


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    queue = FairQueue()
    for uid in range(20_000):
        context = RequestContext("r", tenant=str(uid))
        one = Request.new(uid, 0, uid, context, Sequence(np.zeros(4, np.int32), Stop(1)), 0.0)
        queue.push(one)
        if uid % 3 == 0:
            queue.pop()
        else:
            one.move_to(State.FINISHED)
            queue.discard(one)
    kept = vars(queue)
    assert len(kept["_idle"]) <= 4096 and len(kept["_heap"]) < 200 and not kept["_active"]


def test_weights_share_an_engine() -> None:
    rig = Rig(SchedulerConfig(), max_num_seqs=4, num_pages=400, page_size=4)
    for handle in range(60):
        rig.submit(handle, a_sequence(8, 20), tenant="light")
    for handle in range(100, 160):
        rig.submit(handle, a_sequence(8, 20), tenant="heavy", weight=3)
    while len([h for _, h in rig.ends if h >= 100]) < 45:
        rig.step()
    done = len([h for _, h in rig.ends if h < 100])
    assert 12 <= done <= 20, "a third of 45, and what ran before the others came"
    rig.run()


def test_priority_counts_within_a_tenant_alone() -> None:
    rig = Rig(SchedulerConfig(), max_num_seqs=1)
    for handle, tenant, priority in ((0, "a", 5), (1, "a", -1), (2, "b", 9), (3, "a", 0)):
        rig.submit(handle, a_sequence(4, 4), tenant=tenant, priority=priority)
    rig.run()
    order = list(dict.fromkeys(key[1] for key in rig.order))
    assert [h for h in order if h != 2] == [1, 3, 0], "lower first"
    assert order.index(2) <= 1, "the other tenant's turn came though its priority is the lowest"


@pytest.mark.parametrize(("sent", "read"), [(1, 1), (7, 7), (MAX_WEIGHT, MAX_WEIGHT), (MAX_WEIGHT + 5, MAX_WEIGHT)])
def test_weights_travel_and_have_a_bound(sent: int, read: int) -> None:
    message = context_to_pb(RequestContext("r", tenant="t", weight=sent))
    assert context_from_pb(message).weight == read
