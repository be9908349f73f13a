"""The core's behaviour, driven in one thread against a fake worker."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import Finish, Report
from quire_common.errors import Internal, InvalidArgument, Overloaded, QuireError, Unavailable
from quire_common.finish import FinishReason
from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed, with_epoch


def refused(rig: Rig, sequence: object, **context: object) -> QuireError:
    with pytest.raises(QuireError) as caught:
        rig.submit(77, sequence, **context)  # type: ignore[arg-type]  # as given by the table
    return caught.value


def test_lockstep_sends_one_grant_per_step_and_report() -> None:
    rig = Rig(SchedulerConfig(lockstep=True))
    rig.submit(1, a_sequence(5, 9))
    grant = rig.core.next_grant(rig.now)
    assert grant is not None and grant.budget is not None and grant.budget.step_limit == 1
    assert rig.core.next_grant(rig.now) is None, "one is outstanding"
    rig.worker.deliver(grant)
    report = rig.worker.step()
    assert report is not None and rig.worker.step() is None, "the worker needs a Grant for each step"
    rig.collect(rig.core.on_report(report, rig.now))
    assert rig.core.next_grant(rig.now) is not None
    assert len(rig.tokens[0, 1]) == 1


def test_idle_core_sends_no_grants() -> None:
    rig = Rig()
    assert rig.core.next_grant(rig.now) is None
    rig.submit(1, a_sequence(5, 2))
    rig.run()
    assert rig.core.next_grant(rig.now) is None
    assert rig.worker.step() is None


def test_prefill_is_chunked_by_the_budget() -> None:
    config = SchedulerConfig(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    rig = Rig(config, page_size=4)
    rig.submit(1, a_sequence(20, 4))
    rig.run()
    budget = rig.worker.seen[0].budget
    assert budget is not None and (budget.tokens_per_step, budget.chunk_cap) == (8, 4)
    assert rig.core.stats.steps == 5 + 3
    assert rig.tokens[0, 1] == undisturbed(a_sequence(20, 4))[0]


@pytest.mark.parametrize(("page_size", "tokens"), [(16, 512), (64, 512)])
def test_cpu_worker_gets_small_step_budgets(page_size: int, tokens: int) -> None:
    rig = Rig(page_size=page_size)
    rig.submit(1, a_sequence(5, 2))
    rig.run()
    assert rig.worker.seen[0].budget is not None and rig.worker.seen[0].budget.tokens_per_step == tokens


@pytest.mark.parametrize(
    ("sequence", "code"),
    [
        (a_sequence([], 4), "EMPTY_PROMPT"),
        (a_sequence(256, 4), "PROMPT_TOO_LONG"),
        (a_sequence([5, 97], 4), "BAD_TOKEN_ID"),
        (a_sequence([-1], 4), "BAD_TOKEN_ID"),
        (a_sequence(4, 0), "BAD_MAX_TOKENS"),
        (a_sequence(4, 2, output_ids=np.array([1, 2], np.int32)), "NOTHING_TO_GENERATE"),
        (a_sequence(4, 9, output_ids=np.array([1000], np.int32)), "BAD_TOKEN_ID"),
    ],
)
def test_impossible_requests_are_refused_with_typed_errors(sequence: object, code: str) -> None:
    rig = Rig(num_pages=200)
    error = refused(rig, sequence)
    assert isinstance(error, InvalidArgument) and error.code == code and error.fix and error.param
    assert rig.core.idle


def test_longest_context_is_bounded_by_pages() -> None:
    rig = Rig(num_pages=9, page_size=4, max_model_len=256)
    assert rig.core.max_len == 32
    assert refused(rig, a_sequence(32, 4)).code == "PROMPT_EXCEEDS_PAGES"
    rig.submit(1, a_sequence(10, 200))
    rig.run()
    assert rig.ends[0, 1] is FinishReason.LENGTH and len(rig.tokens[0, 1]) == 22


def test_the_queue_is_bounded() -> None:
    rig = Rig(SchedulerConfig(max_waiting=3))
    for handle in range(3):
        rig.submit(handle, a_sequence(4))
    error = refused(rig, a_sequence(4))
    assert isinstance(error, Overloaded) and error.code == "QUEUE_FULL" and error.retry_after_s >= 1
    rig.run()
    assert len(rig.ends) == 3


def test_a_flooding_tenant_refuses_only_itself() -> None:
    rig = Rig(SchedulerConfig(max_waiting=10))
    for handle in range(9):
        rig.submit(handle, a_sequence(4), tenant="flood")
    assert refused(rig, a_sequence(4), tenant="flood").code == "TENANT_QUEUE_FULL"
    rig.submit(9, a_sequence(4), tenant="other")
    rig.run()


def test_a_handle_in_use_is_refused_and_does_no_harm() -> None:
    rig = Rig()
    rig.submit(77, a_sequence(4))
    assert refused(rig, a_sequence(4)).code == "HANDLE_IN_USE"
    rig.run()
    rig.submit(77, a_sequence(4), session=1)
    rig.run()


def test_page_shortage_preempts_the_latest_without_losing_tokens() -> None:
    rig = Rig(num_pages=17, page_size=4, max_num_seqs=4)
    sequences = {handle: a_sequence(6, 30) for handle in range(4)}
    for handle, sequence in sequences.items():
        rig.submit(handle, sequence)
    rig.run()
    assert rig.core.stats.preemptions > 0
    for handle, sequence in sequences.items():
        assert rig.tokens[0, handle] == undisturbed(sequence, max_len=rig.core.max_len)[0]
    ends = [key[1] for key in rig.order if key in rig.ends]
    last_token = {handle: max(i for i, h in enumerate(ends) if h == handle) for handle in sequences}
    assert min(last_token, key=lambda handle: last_token[handle]) == 0, "the oldest ends first"


def test_the_oldest_is_never_preempted() -> None:
    rig = Rig(num_pages=13, page_size=2, max_num_seqs=6)
    for handle in range(6):
        rig.submit(handle, a_sequence(4, 18))
    while not rig.core.idle:
        oldest = min(rig.core._replica.requests.values(), key=lambda r: r.uid)
        before = oldest.preemptions
        rig.step()
        assert oldest.preemptions == before
    rig.run()
    assert rig.core.stats.preemptions > 0


def test_priority_orders_starts_and_preemptions() -> None:
    rig = Rig(SchedulerConfig(scheduling_policy="priority"), max_num_seqs=1)
    for handle, priority in ((1, 5), (2, 0), (3, 9), (4, -1)):
        rig.submit(handle, a_sequence(4, 4), priority=priority)
    rig.run()
    assert list(dict.fromkeys(key[1] for key in rig.order)) == [4, 2, 1, 3]


def test_higher_priority_request_passes_ready_ones() -> None:
    rig = Rig(SchedulerConfig(scheduling_policy="priority", lockstep=True), max_num_seqs=2)
    for handle in range(6):
        rig.submit(handle, a_sequence(4, 6), priority=5)
    for _ in range(3):
        rig.step()
    rig.submit(9, a_sequence(4, 6), priority=0)
    rig.run()
    assert list(dict.fromkeys(key[1] for key in rig.order))[:3] == [0, 1, 9]


def test_fair_shares_tokens_between_tenants() -> None:
    rig = Rig(SchedulerConfig(scheduling_policy="fair"), max_num_seqs=4, num_pages=400, page_size=4)
    for handle in range(30):
        rig.submit(handle, a_sequence(8, 20), tenant="many")
    for handle in range(100, 110):
        rig.submit(handle, a_sequence(8, 20), tenant="few")
    while len([h for _, h in rig.ends if h >= 100]) < 10:
        rig.step()
    done = len([h for _, h in rig.ends if h < 100])
    assert 7 <= done <= 14, "while the few were served, the many got about as much"
    rig.run()


def test_fcfs_does_not_share_between_tenants() -> None:
    rig = Rig(SchedulerConfig(scheduling_policy="fcfs"), max_num_seqs=4, num_pages=400, page_size=4)
    for handle in range(30):
        rig.submit(handle, a_sequence(8, 20), tenant="many")
    rig.submit(100, a_sequence(8, 20), tenant="few")
    rig.run()
    assert rig.order[-1] == (0, 100)


def test_abort_in_every_state_frees_everything() -> None:
    rig = Rig(max_num_seqs=2, num_pages=9, page_size=4)
    for handle in range(6):
        rig.submit(handle, a_sequence(6, 20))
    assert rig.core.abort(0, 5, rig.now)
    for _ in range(6):
        rig.step()
    for handle in range(5):
        assert rig.core.abort(0, handle, rig.now)
        assert not rig.core.abort(0, handle, rig.now)
        rig.core.check_integrity()
    rig.run()
    assert set(rig.ends.values()) == {FinishReason.ABORT}
    assert rig.notes[0, 0].completion_tokens == len(rig.tokens[0, 0]) > 0


def test_200_aborts_leave_no_page() -> None:
    rig = Rig(SchedulerConfig(max_waiting=500), max_num_seqs=64, num_pages=3000)
    for session in range(10):
        for handle in range(20):
            rig.submit(handle, a_sequence(20, 100), session=session)
    for _ in range(20):
        rig.step()
    assert rig.core.load().referenced_pages > 0
    assert sum(rig.core.abort_session(session, rig.now) for session in range(10)) == 200
    rig.step()
    assert rig.core.load().referenced_pages == 0
    rig.run()
    assert not rig.ends, "nobody listens"


def test_deadlines_fail_waiting_and_running_requests() -> None:
    rig = Rig(SchedulerConfig(lockstep=True), max_num_seqs=1)
    soon = rig.now + 0.01
    rig.submit(1, a_sequence(4, 100), deadline_s=soon)
    rig.submit(2, a_sequence(4, 100), deadline_s=soon)
    rig.submit(3, a_sequence(4, 10))
    rig.run()
    assert {handle: error.code for (_, handle), error in rig.errors.items()} == {
        1: "DEADLINE_EXCEEDED",
        2: "DEADLINE_EXCEEDED",
    }
    assert rig.tokens[0, 1] and not rig.tokens[0, 2]
    assert refused(rig, a_sequence(4), deadline_s=rig.now - 1.0).code == "DEADLINE_EXCEEDED"


def test_draining_core_refuses_new_requests_and_finishes_admitted_ones() -> None:
    rig = Rig()
    rig.submit(1, a_sequence(4, 10))
    rig.step()
    rig.core.drain()
    error = refused(rig, a_sequence(4))
    assert isinstance(error, Unavailable) and error.code == "DRAINING"
    assert not rig.core.idle
    rig.run()
    assert rig.core.idle and rig.ends[0, 1] is FinishReason.LENGTH


def test_lost_pages_are_recomputed_but_not_for_ever() -> None:
    worker = FakeWorker(make_hello(), lose_pages=0.03)
    rig = Rig(worker=worker)
    for handle in range(8):
        rig.submit(handle, a_sequence(9, 20))
    rig.run()
    assert rig.core.stats.pages_lost > 0
    for handle in range(8):
        if (0, handle) not in rig.errors:
            assert rig.tokens[0, handle] == undisturbed(a_sequence(9, 20))[0]
    never = Rig(worker=FakeWorker(make_hello(), lose_pages=1.0))
    never.submit(1, a_sequence(9, 20))
    never.run()
    assert never.errors[0, 1].code == "PAGES_LOST" and never.core.stats.pages_lost == 4


def report(rig: Rig, **columns: object) -> Report:
    return Report(rig.worker.hello.epoch, **columns)  # type: ignore[arg-type]  # columns by name


def started(rig: Rig) -> int:
    rig.submit(1, a_sequence(4, 50))
    grant = rig.core.next_grant(rig.now)
    assert grant is not None
    return grant.start[0].slot


def test_an_error_row_fails_its_request_alone() -> None:
    rig = Rig()
    rig.submit(2, a_sequence(4, 5))
    slot = started(rig)
    row = {
        "first_step": 1,
        "retired": 1,
        "step_applied": np.array([1], np.int64),
        "step_rows": np.array([1], np.int32),
        "slot": np.array([slot], np.int32),
        "count": np.array([0], np.int32),
        "finish": np.array([Finish.ERROR], np.uint8),
    }
    rig.collect(rig.core.on_report(report(rig, **row), rig.now))
    assert rig.errors[0, 2].code == "WORKER_ERROR"
    rig.core.check_integrity()
    assert not rig.core.idle


def test_a_refused_start_fails_its_request() -> None:
    rig = Rig()
    slot = started(rig)
    error = Internal("BAD_PAGE", "no", "none")
    rig.collect(rig.core.on_report(report(rig, retired=1, error=[(slot, error), (99, error)]), rig.now))
    assert rig.errors[0, 1].code == "BAD_PAGE"
    assert rig.core.load().referenced_pages == 0
    rig.core.check_integrity()


def test_frames_of_another_epoch_are_dropped() -> None:
    rig = Rig()
    slot = started(rig)
    other = with_epoch(rig.worker.hello, 2).epoch
    stray = Report(other, retired=1, error=[(slot, Internal("X", "", ""))])
    rig.collect(rig.core.on_report(stray, rig.now))
    assert not rig.errors and not rig.core.idle


def test_report_of_an_unknown_slot_is_an_error() -> None:
    rig = Rig()
    started(rig)
    row = {
        "step_applied": np.array([1], np.int64),
        "step_rows": np.array([1], np.int32),
        "slot": np.array([1000], np.int32),
        "count": np.array([1], np.int32),
        "token": np.array([1], np.int32),
        "finish": np.zeros(1, np.uint8),
    }
    with pytest.raises(Internal):
        rig.core.on_report(report(rig, **row), rig.now)


def test_lost_worker_fails_all_requests_and_releases_leases() -> None:
    store: dict[bytes, list[int]] = {}
    first = Rig(kvstore=True, worker=FakeWorker(make_hello(), store=store))
    first.submit(1, a_sequence(13, 3))
    first.run()
    rig = Rig(kvstore=True, worker=FakeWorker(make_hello(), store=store))
    rig.submit(1, a_sequence(13, 3))
    rig.submit(2, a_sequence(3, 3))
    rig.step()
    rig.step()
    assert rig.leases
    rig.collect(rig.core.worker_lost(Unavailable("WORKER_LOST", "gone", "retry"), rig.now))
    rig._effects()
    assert {error.code for error in rig.errors.values()} == {"WORKER_LOST"} and len(rig.errors) == 2
    assert not rig.leases
    rig.core.check_integrity()
    assert rig.core.load().referenced_pages == 0, "nor is a page promised that no load will fill"


def test_credit_is_granted_ahead_of_need() -> None:
    rig = Rig(worker=FakeWorker(make_hello(num_pages=200), depth=3))
    sequences = {handle: a_sequence(6 + handle, 30) for handle in range(10)}
    for handle, sequence in sequences.items():
        rig.submit(handle, sequence)
    rig.run()
    assert all(rig.tokens[0, h] == undisturbed(s)[0] for h, s in sequences.items())
    assert rig.core.stats.grants < rig.core.stats.steps


def test_finished_note_has_timings_and_usage() -> None:
    rig = Rig()
    rig.core.submit(0, 1, RequestContext("r"), a_sequence(10, 5), rig.now)
    rig.now += 2.0
    rig.run()
    note = rig.notes[0, 1]
    hops = {(hop.service, hop.phase): hop for hop in note.hops}
    assert 2_000_000 <= hops["scheduler", "queue"].us < 2_010_000
    assert hops["worker", "prefill"].operations == 10
    assert hops["worker", "decode"].operations == 4
    assert hops["worker", "decode"].us == pytest.approx(4000, abs=100)
    assert (note.prompt_tokens, note.completion_tokens, note.cached_tokens) == (10, 5, 0)
    assert rig.admitted == [(0, 1)]
