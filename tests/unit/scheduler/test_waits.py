"""Figures of the scheduler about requests that wait."""

from __future__ import annotations

import pytest

from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.request import State
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello


def narrow_rig() -> Rig:
    """One sequence decodes at once."""
    worker = FakeWorker(make_hello(max_num_seqs=1, num_slots=1, num_pages=100, page_size=4))
    return Rig(SchedulerConfig(max_num_seqs=1), worker=worker)


def test_the_oldest_wait_is_that_of_the_request_that_waits_longest() -> None:
    rig = narrow_rig()
    assert rig.core.oldest_wait_s(rig.now) == 0.0
    rig.submit(1, a_sequence(4, 40))
    assert rig.core.next_grant(rig.now) is not None
    first = rig.now
    assert rig.core.oldest_wait_s(first + 5) == 0.0, "a request in a slot waits no more"
    rig.now = first + 10
    rig.submit(2, a_sequence(4, 4))
    rig.now = first + 20
    rig.submit(3, a_sequence(4, 4))
    assert rig.core.oldest_wait_s(first + 25) == pytest.approx(15)
    rig.core.abort(0, 2, rig.now)
    assert rig.core.oldest_wait_s(first + 25) == pytest.approx(5)


def test_a_preempted_request_waits_since_it_lost_its_slot() -> None:
    rig = narrow_rig()
    rig.submit(1, a_sequence(4, 40))
    assert rig.core.next_grant(rig.now) is not None
    request = rig.core._replica.requests[0, 1]
    rig.core._lifecycle.preempt(request, rig.now + 30)
    rig.core._lifecycle.retired([request])
    assert request.state is State.READY
    assert rig.core.oldest_wait_s(rig.now + 31) == pytest.approx(1)


def test_requests_that_wait_for_a_slot_are_not_deferred() -> None:
    rig = narrow_rig()
    for handle in (1, 2, 3):
        rig.submit(handle, a_sequence(4, 40))
    rig.core.next_grant(rig.now)
    assert rig.core.load().waiting == 2 and rig.core.deferred == 0


def test_requests_that_wait_for_the_kvstore_are_deferred() -> None:
    rig = Rig(SchedulerConfig(), kvstore=True, page_size=4)
    rig.submit(1, a_sequence(40, 4))
    rig.core.next_grant(rig.now)
    assert rig.core.take_effects().lookups, "the kvstore is asked"
    assert rig.core.load().waiting == 1 and rig.core.deferred == 1
