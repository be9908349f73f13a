"""A request's own state: transitions that exist, and what it holds; and the records of handovers beside it."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.sequence import RequestContext, Sequence, Stop
from quire_scheduler.core.pending_queue import PendingQueue
from quire_scheduler.core.queue_policy import POLICIES
from quire_scheduler.core.request import Request, State
from quire_scheduler.disaggregation.handover_records import HandoverRecords


def a_request(uid: int = 1) -> Request:
    return Request.new(uid, 0, uid, RequestContext(f"r{uid}"), Sequence(np.zeros(4, np.int32), Stop(9)), 0.0)


@pytest.mark.parametrize("state", [State.STARTED, State.PREEMPTED, State.PULLING, State.QUEUED])
def test_queued_request_refuses_states_that_cannot_follow(state: State) -> None:
    with pytest.raises(AssertionError, match="cannot change its state"):
        a_request().move_to(state)


def test_preemption_counts_only_where_it_is_said() -> None:
    request = a_request()
    for counts in (True, False):
        for state in (State.READY, State.STARTED):
            request.move_to(state)
        request.preempt(1.0, counts=counts)
    assert request.state is State.PREEMPTED and request.preemptions == 1


def test_request_holds_one_slot_at_a_time() -> None:
    request = a_request()
    request.take_slot(3)
    with pytest.raises(AssertionError, match="second slot"):
        request.take_slot(4)
    request.leave_slot()
    request.take_slot(4)
    assert request.slot == 4


def test_prompt_is_counted_once() -> None:
    request = a_request()
    assert [request.count_prompt() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", POLICIES)
def test_request_enters_the_policy_or_waits_aside_until_recalled(name: str) -> None:
    queue, plain, waiting = PendingQueue(POLICIES[name]()), a_request(1), a_request(2)
    queue.enter(waiting, aside=True)
    queue.enter(plain, aside=False)
    assert (len(queue), len(queue.policy), waiting.state) == (2, 1, State.ASIDE)
    queue.recall(waiting)
    assert (len(queue), len(queue.policy), waiting.state) == (2, 2, State.QUEUED)
    queue.check_integrity()


def test_handover_lacks_what_has_not_come() -> None:
    records, request = HandoverRecords(), a_request()
    assert not records.is_awaited(request) and not records.had_ticket(request)
    records.expect(request)
    assert records.lacks_ticket(request) and records.lacks_token(request)
    records.take_ticket(request)
    assert records.is_awaited(request) and records.had_ticket(request) and not records.lacks_ticket(request)
    records.take_tokens(request, (7, 8))
    assert not records.is_awaited(request) and request.output.tolist() == [7, 8]
    with pytest.raises(AssertionError, match="second ticket"):
        records.take_ticket(request)


def test_given_up_handover_lacks_nothing_and_takes_no_ticket() -> None:
    records, request = HandoverRecords(), a_request()
    records.expect(request)
    records.give_up(request)
    assert records.had_ticket(request) and not records.is_awaited(request)


def test_integrity_notices_a_handover_of_an_ended_request() -> None:
    records, request = HandoverRecords(), a_request()
    records.expect(request)
    records.check_integrity([request])
    with pytest.raises(AssertionError, match="of no request"):
        records.check_integrity([])
    records.forget(request)
    records.check_integrity([])
