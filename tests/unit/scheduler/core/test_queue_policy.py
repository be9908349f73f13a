"""Who goes next."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.sequence import RequestContext, Sequence, Stop
from quire_scheduler.core.queue_policy import POLICIES, OrderedQueue, QueuePolicy
from quire_scheduler.core.request import Request, State


def request(uid: int, *, tenant: str = "", priority: int = 0, prompt: int = 10) -> Request:
    context = RequestContext(f"r{uid}", tenant=tenant, priority=priority)
    return Request.new(uid, 0, uid, context, Sequence(np.zeros(prompt, np.int32), Stop(1)), 0.0)


def popped(queue: QueuePolicy) -> list[int]:
    order = []
    while (one := queue.pop()) is not None:
        one.move_to(State.READY)
        order.append(one.uid)
    return order


def gone(queue: QueuePolicy, one: Request) -> None:
    one.move_to(State.FINISHED)
    queue.discard(one)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_skip_requests_that_left(name: str) -> None:
    queue = POLICIES[name]()
    requests = [request(uid) for uid in range(1, 7)]
    for one in requests:
        queue.push(one)
    gone(queue, requests[0])
    gone(queue, requests[3])
    assert len(queue) == 4
    assert popped(queue) == [2, 3, 5, 6]
    assert len(queue) == 0 and queue.pop() is None and queue.next_key() is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_aborts_do_not_grow_a_stalled_queue(name: str) -> None:
    queue = POLICIES[name]()
    queue.push(request(0))
    for uid in range(1, 2000):
        one = request(uid)
        queue.push(one)
        gone(queue, one)
    ordered = queue if isinstance(queue, OrderedQueue) else vars(queue)["_active"][""].queue
    inside = len(ordered._heap)
    assert inside < 200
    assert popped(queue) == [0]


def test_fcfs_orders_by_arrival() -> None:
    queue = POLICIES["fcfs"]()
    for uid in (3, 1, 2):
        queue.push(request(uid, priority=-uid))
    assert queue.next_key() == 1
    assert popped(queue) == [1, 2, 3]


def test_priority_orders_by_value_then_arrival() -> None:
    queue = POLICIES["priority"]()
    for uid, priority in ((1, 5), (2, 0), (3, -(2**31)), (4, 5), (5, 2**31 - 1)):
        queue.push(request(uid, priority=priority))
    assert popped(queue) == [3, 2, 1, 4, 5]


def test_fair_alternates_by_tokens_not_by_requests() -> None:
    queue = POLICIES["fair"]()
    for uid in range(10):
        queue.push(request(uid, tenant="long", prompt=100))
    for uid in range(10, 50):
        queue.push(request(uid, tenant="short", prompt=25))
    first = popped(queue)[:25]
    assert sum(uid < 10 for uid in first) == 5, "four short ones cost what a long one does"


def test_fair_charges_output_too() -> None:
    queue = POLICIES["fair"]()
    for uid in range(4):
        queue.push(request(uid, tenant="ab"[uid % 2]))
    assert (queue.pop() or request(99)).context.tenant == "a"
    queue.charge(RequestContext("r", tenant="a"), 1000)
    assert [r.context.tenant for r in (queue.pop(), queue.pop(), queue.pop()) if r] == ["b", "b", "a"]


def test_fair_gives_no_credit_for_idle_time() -> None:
    queue = POLICIES["fair"]()
    for uid in range(100):
        queue.push(request(uid, tenant="busy"))
        queue.pop()
    for uid in range(100, 110):
        queue.push(request(uid, tenant="busy"))
        queue.push(request(uid + 100, tenant="new"))
    tenants = ["busy" if uid < 200 else "new" for uid in popped(queue)][:10]
    assert 4 <= tenants.count("busy") <= 6
