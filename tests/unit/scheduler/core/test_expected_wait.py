"""Requests that would wait too long are refused when they come, by what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quire_common.errors import Overloaded
from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.queue_policy import POLICIES
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello
from tests.tiers import deep_after


def paced_rig(step_us: int = 0, **options: object) -> Rig:
    """A rig whose worker says that each step took so long; its clock counts a millisecond per step."""
    config = SchedulerConfig(**{"max_waiting": 4096, **options})  # type: ignore[arg-type]  # as given by the test
    worker = FakeWorker(make_hello(max_num_seqs=4, num_pages=4000, page_size=4))
    worker.step_us = step_us
    return Rig(config, worker=worker)


def measured_rig(answer: int = 40, **options: object) -> Rig:
    """A paced rig that has served 16 requests with so many output tokens, so that times are known; it is idle."""
    rig = paced_rig(**options)  # type: ignore[arg-type]  # as given by the test
    for handle in range(16):
        rig.submit(handle, a_sequence(4, answer))
    rig.run()
    return rig


def wait_s(rig: Rig, **context: object) -> float:
    return rig.core._replica.expected_wait.wait_s(RequestContext("r", **context))  # type: ignore[arg-type]  # as given


def submit_until_refused(rig: Rig, first: int, sequence: object, most: int = 1000) -> Overloaded:
    for handle in range(first, first + most):
        try:
            rig.submit(handle, sequence)  # type: ignore[arg-type]  # as given by the test
        except Overloaded as error:
            return error
    raise AssertionError("nothing was refused")


def test_nothing_is_refused_before_anything_was_measured() -> None:
    rig = paced_rig(max_queue_wait_s=0.001)
    for handle in range(500):
        rig.submit(handle, a_sequence(4, 20))
    rig.run()
    assert len(rig.ends) == 500


def test_requests_that_would_wait_too_long_are_refused_at_once() -> None:
    rig = measured_rig(max_queue_wait_s=0.2)
    error = submit_until_refused(rig, 100, a_sequence(4, 40))
    assert error.code == "QUEUE_WAIT_TOO_LONG" and error.http_status == 429
    # Four rows, some 42 ms each: 95 a second, so that 0.2 s are about 19 requests beside the running ones.
    assert 14 <= rig.core.load().waiting - 4 <= 30
    rig.run()
    rig.submit(9999, a_sequence(4, 4))
    rig.run()


def test_the_time_to_retry_is_when_the_wait_is_short_enough_and_varies() -> None:
    rig = measured_rig(answer=400, max_queue_wait_s=0.2)
    submit_until_refused(rig, 100, a_sequence(4, 400))
    refusals = []
    for handle in range(1000, 1200):
        with pytest.raises(Overloaded) as refused:
            rig.submit(handle, a_sequence(4, 400))
        refusals.append(refused.value.retry_after_s)
    least = max(wait_s(rig) - 0.2, 1.0)
    assert min(refusals) >= least - 0.1 and max(refusals) <= 1.5 * least + 0.1
    assert len(set(refusals)) >= 5, "refused clients must not return all at once"


def test_a_deadline_that_cannot_be_met_is_refused() -> None:
    rig = measured_rig()
    for handle in range(100, 200):
        rig.submit(handle, a_sequence(4, 40))
    rig.step()
    assert 0.5 < wait_s(rig) < 2.0
    with pytest.raises(Overloaded, match="DEADLINE_TOO_NEAR"):
        rig.submit(900, a_sequence(4, 40), deadline_s=rig.now + 0.3)
    rig.submit(901, a_sequence(4, 40), deadline_s=rig.now + 30)
    rig.run()
    assert (0, 901) in rig.ends


def test_a_request_that_ran_before_is_not_refused_for_its_wait() -> None:
    rig = measured_rig(max_queue_wait_s=0.05)
    submit_until_refused(rig, 100, a_sequence(4, 40))
    rig.submit(900, a_sequence(4, 40, output_ids=np.array([5], np.int32)))
    rig.run()


def test_prompts_count_by_the_speed_of_the_worker_and_cached_ones_do_not() -> None:
    rig = paced_rig(step_us=1000)
    rng = np.random.default_rng(0)
    for handle in range(4):
        rig.submit(handle, a_sequence(rng.integers(2, 90, 240), 1))
    rig.run()
    speed = rig.core._replica.kv.cost
    for handle in range(100, 200):
        rig.submit(handle, a_sequence(rng.integers(2, 90, 240), 1))
    assert wait_s(rig) >= speed.prefill_s(100 * 240) > 0
    rig.run()
    same = rng.integers(2, 90, 240)
    for handle in range(1000, 1200):
        rig.submit(handle, a_sequence(same, 1))
    rig.run()
    for handle in range(2000, 2100):
        rig.submit(handle, a_sequence(same, 1))
    assert wait_s(rig) < speed.prefill_s(100 * 240) / 2
    rig.run()


def test_free_slots_mean_no_wait() -> None:
    rig = measured_rig()
    assert wait_s(rig) == 0.0
    rig.submit(50, a_sequence(4, 40))
    assert wait_s(rig) == 0.0


def test_a_higher_priority_waits_for_fewer() -> None:
    rig = measured_rig(scheduling_policy="priority")
    for handle in range(100, 200):
        rig.submit(handle, a_sequence(4, 40), priority=5)
    rig.step()
    assert wait_s(rig, priority=1) < wait_s(rig, priority=5) / 5
    rig.run()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_queue_of_others_is_ahead_by_the_policy(policy: str) -> None:
    rig = measured_rig(scheduling_policy=policy)
    for handle in range(100, 200):
        rig.submit(handle, a_sequence(4, 40), tenant="flood")
    rig.step()
    alone, flood = wait_s(rig, tenant="other"), wait_s(rig, tenant="flood")
    assert alone < flood / 5 if policy == "fair" else alone == flood
    rig.run()


def arrivals(seed: int) -> Iterator[tuple[int, int, int]]:
    """Steps until the next request, its prompt and its answer; about twice what four rows can serve."""
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(1, 8)), int(rng.integers(1, 60)), int(rng.integers(2, 60))


@pytest.mark.parametrize("bound_ms", deep_after(2, [100, 400, 200]))
@pytest.mark.parametrize("seed", deep_after(1, range(3)))
def test_the_admitted_wait_hardly_longer_than_the_bound(seed: int, bound_ms: int) -> None:
    rig = paced_rig(step_us=1000, max_queue_wait_s=bound_ms / 1000)
    submitted: dict[int, float] = {}
    refused = 0
    for handle, (gap, prompt, answer) in zip(range(600), arrivals(seed), strict=False):
        for _ in range(gap):
            rig.step()
        ids = np.random.default_rng(seed + handle).integers(2, 90, prompt)
        try:
            rig.submit(handle, a_sequence(ids, answer))
            submitted[handle] = rig.now
        except Overloaded:
            refused += 1
    assert refused > 50, "twice the capacity came"
    assert len(submitted) > 150, "what fits is served"
    waits = waits_of(rig, submitted)
    # The first come before anything is measured.
    late = [wait for handle, wait in waits.items() if handle > 100 and wait > 2 * bound_ms / 1000]
    assert not late, (bound_ms, late)


def waits_of(rig: Rig, submitted: dict[int, float]) -> dict[int, float]:
    """How long each waited, by the core's own stamps."""
    rig.run()
    return {h: rig.notes[0, h].hops[0].us / 1e6 for h in submitted}
