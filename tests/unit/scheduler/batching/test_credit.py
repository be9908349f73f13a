"""Free-running: credit never runs out while pages last, spares wait their turn, and give way first under pressure."""

from __future__ import annotations

import pytest

from quire_common.credit import Grant, Report
from quire_common.sequence import RequestContext
from quire_scheduler.batching.credit import Credit
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed
from tests.tiers import deep_after


def delayed(delay: int, config: SchedulerConfig | None = None, *, depth: int = 2, **hello: int) -> Rig:
    """A rig in which each frame takes so many steps."""
    worker = FakeWorker(make_hello(page_size=16, max_model_len=512, **hello), depth=depth)
    config = config or SchedulerConfig(max_waiting=10_000)
    return Rig(config, worker=worker, grant_delay=lambda: delay, report_delay=lambda: delay)


@pytest.mark.parametrize("delay", deep_after(2, [0, 33, 1, 9]))
def test_distant_worker_never_runs_out_of_credit(delay: int) -> None:
    """33 steps are 20 ms each way where a step takes 0.6 ms."""
    rows = 8
    rig = delayed(delay, max_num_seqs=rows, num_pages=1000)
    for handle in range(400):
        rig.submit(handle, a_sequence(8, 60 + handle * 7 % 80))
    # To find the lead takes a few round trips.
    for _ in range(20 * delay + 100):
        rig.step()
    steps, tokens = rig.worker.steps_launched, rig.core.stats.generation_tokens
    turns = 600
    for _ in range(turns):
        rig.step()
    assert rig.worker.steps_launched - steps == turns, "a step each turn"
    assert rig.core.stats.generation_tokens - tokens >= turns * rows * 0.99, "of all rows"
    assert rig.core.stats.preemptions == rig.core.stats.reclaims == 0
    rig.core.check_integrity()


def test_steady_decode_needs_few_grants() -> None:
    rig = delayed(4, max_num_seqs=32, num_pages=2000)
    for handle in range(32):
        rig.submit(handle, a_sequence(5 + handle, 400))
    for _ in range(60):
        rig.step()
    grants, steps = rig.core.stats.grants, rig.core.stats.steps
    for _ in range(320):
        rig.step()
    assert rig.core.stats.steps - steps >= 319
    assert rig.core.stats.grants - grants <= 320 / 16 + 2, "about one in a page of steps, for all slots together"
    rig.run()


def test_free_running_budget_is_sent_once_without_step_limit() -> None:
    rig = delayed(2)
    for handle in range(6):
        rig.submit(handle, a_sequence(9, 60))
    rig.run()
    budgets = [grant.budget for grant in rig.worker.seen]
    assert budgets[0] is not None and budgets[0].step_limit == 0
    assert len(budgets) > 1 and not any(budgets[1:])


def test_hanging_worker_gets_a_bounded_number_of_grants() -> None:
    hello = make_hello(max_num_seqs=4, num_pages=4000)
    core = Scheduler(SchedulerConfig(max_waiting=10_000), hello)
    grants: list[Grant] = []
    for handle in range(3000):
        core.submit(0, handle, RequestContext("r"), a_sequence(4, 4), 1.0)
        while grant := core.next_grant(1.0):
            grants.append(grant)
        core.abort(0, handle, 1.0)
    assert 8 <= len(grants) <= 20
    core.on_report(Report(hello.epoch, retired=grants[-1].seq), 1.0)
    assert core.next_grant(1.0) is not None, "and hears the rest once it answers"
    core.check_integrity()


def test_starts_ahead_follow_the_rate_of_finishes() -> None:
    spares = {}
    for length in (400, 40):
        rig = delayed(8, max_num_seqs=16, num_pages=2000)
        for handle in range(600):
            rig.submit(handle, a_sequence(4, length + handle % 16))
        for _ in range(500):
            rig.step()
        load = rig.core.load()
        assert load.running == load.max_num_seqs == 16
        spares[length] = rig.core._replica.slots.num_active - 16
        assert load.waiting == len(rig.core._replica.waiting) + spares[length]
    assert 1 <= spares[400] < spares[40] <= 24, "40 slots, of which 16 are rows"


def test_max_num_seqs_bounds_decoding_rows() -> None:
    rig = delayed(3, SchedulerConfig(max_num_seqs=2), max_num_seqs=8, num_pages=400)
    for handle in range(9):
        rig.submit(handle, a_sequence(4, 30))
    while not rig.core.idle:
        rig.step()
        assert len(rig.worker.slots) <= 2
    rig.run()


def test_uncomputed_prompts_in_spare_slots_are_bounded() -> None:
    config = SchedulerConfig(max_waiting=1000, max_num_batched_tokens=32)
    rig = delayed(8, config, max_num_seqs=8, num_pages=4000)
    for handle in range(200):
        rig.submit(handle, a_sequence(60, 30))
    slots, most = rig.core._replica.slots, 0
    for _ in range(400):
        before = slots.num_active
        rig.step()
        if slots.num_active > max(before, 8):
            most = max(most, slots.waiting_tokens())
    assert 60 <= most <= 4 * 32, "four steps' worth"


def test_spares_are_preempted_before_running_requests_latest_first() -> None:
    rig = delayed(4, SchedulerConfig(enable_prefix_caching=False), max_num_seqs=4, num_pages=41)
    for handle in range(12):
        rig.submit(handle, a_sequence(30, 100))
    stopped: list[int] = []
    while rig.core.stats.reclaims == 0 and not rig.core.idle:
        before = {r.order_key: r for r in rig.core._replica.requests.values() if r.slot >= 0}
        rig.step()
        stopped = [key for key, r in before.items() if r.slot < 0 and (r.session, r.handle) not in rig.ends]
    kept = [r.order_key for r in rig.core._replica.requests.values() if r.slot >= 0]
    assert stopped and min(stopped) > max(kept), "the highest order keys"
    assert rig.core.stats.preemptions == 0
    rig.run()
    for handle in range(12):
        assert rig.tokens[0, handle] == undisturbed(a_sequence(30, 100), max_len=512)[0]


def test_spare_is_not_started_without_pages_for_its_lead() -> None:
    hello = make_hello(max_num_seqs=1, num_pages=8)
    core = Scheduler(SchedulerConfig(), hello)
    core.submit(0, 0, RequestContext("takes five of the seven pages"), a_sequence(16, 4), 1.0)
    core.submit(0, 1, RequestContext("would fit with its prompt alone"), a_sequence(5, 20), 1.0)
    grants = 0
    # The worker has nothing to run yet, its first sequence waits for pages on their way, and acknowledges at once.
    while (grant := core.next_grant(1.0)) is not None and grants < 100:
        grants += 1
        core.on_report(Report(hello.epoch, retired=grant.seq), 1.0)
    assert (grants, core.stats.reclaims, core._replica.slots.num_active) == (1, 0, 1)


@pytest.mark.parametrize("delay", [0, 5])
def test_oldest_request_always_progresses(delay: int) -> None:
    """Its tokens keep coming within a round trip and a few steps, however few pages there are."""
    rig = delayed(delay, max_num_seqs=6, num_pages=14)
    for handle in range(10):
        rig.submit(handle, a_sequence(20, 150))
    silent, oldest, seen = 0, -1, 0
    while not rig.core.idle:
        requests = rig.core._replica.requests.values()
        first = min(requests, key=lambda r: r.uid)
        preempted = first.preemptions
        rig.step()
        assert first.preemptions == preempted, "the oldest is never preempted"
        tokens = len(rig.tokens[first.session, first.handle])
        silent = 0 if (first.uid, tokens) != (oldest, seen) else silent + 1
        oldest, seen = first.uid, tokens
        assert silent <= 4 * (2 * delay + 1) + 20
        rig.core.check_integrity()
    rig.run()
    assert rig.core.stats.preemptions > 0
    for handle in range(10):
        assert rig.tokens[0, handle] == undisturbed(a_sequence(20, 150), max_len=rig.core.max_len)[0]


class Reaching(Credit):
    """With a lead of the test's choice."""

    reach = 0

    def lead(self) -> int:
        return self.reach

    def slack(self) -> int:
        return 0


def test_scarce_credit_is_shared_evenly() -> None:
    """Where the lead cannot be had for all, none has more of it than another: the least credit counts."""
    hello = make_hello(page_size=16, max_num_seqs=4, num_pages=13, max_model_len=180)
    policy = Reaching(SchedulerConfig(), hello)
    rig = Rig(policy=policy, worker=FakeWorker(hello))
    for handle in range(4):
        rig.submit(handle, a_sequence(12, 100))
    rig.step()
    assert [len(start.pages[0]) for start in rig.worker.seen[0].start] == [1, 1, 1, 1]
    policy.reach = 64
    grant = rig.core.next_grant(rig.now)
    assert grant is not None and not grant.start
    assert sorted(grant.grow_slot.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3], "two of the four that each wants"
    assert grant.limit_position.tolist() == [48, 48, 48, 48]
