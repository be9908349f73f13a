"""What the writer sends: Reports joined where they follow closely, never so that a token loses its owner, never late;
and signs of life while there is nothing to tell."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bench.harness.plain_pages import ids
from quire_common.credit import Epoch, Finish, LogprobColumns, Report, StepTiming, WorkerHello
from quire_common.errors import Aborted
from quire_worker.engine.run.report_bundle import MAX_BYTES, MAX_REPORTS, ReportBundle, merge_reports, size_of
from quire_worker.engine.run.session import HEARTBEAT_S, MAX_GRANTS_WAITING, Closed, Flush, Session
from tests.fakes.worker.worker_server import counting_info

EPOCH = Epoch(1, 1)


def a_report(step: int, *tokens: int, retired: int = 1, error: bool = False, prefill: bool = False) -> Report:
    n = len(tokens)
    logprobs = LogprobColumns(
        ids(*range(n)), np.zeros(n, np.float32), ids(*[1] * n), ids(*[1] * n), ids(*tokens), np.zeros(n, np.float32)
    )
    return Report(
        epoch=EPOCH,
        first_step=step,
        retired=retired,
        step_applied=np.array([retired], np.int64),
        step_rows=ids(n),
        step_prefill_tokens=ids(step),
        slot=ids(*range(n)),
        count=ids(*[1] * n),
        token=ids(*tokens),
        finish=np.full(n, Finish.NONE, np.uint8),
        logprobs=logprobs,
        prefill_slot=ids(*[step] * prefill),
        prefill_position=ids(*[step] * prefill),
        moved_id=np.array([step], np.int64),
        moved_status=np.array([0], np.uint8),
        moved_pages=ids(1),
        moved_us=ids(9),
        running=step,
        stalled_slot=ids(step),
        error=[(step, Aborted("X", "x", "x"))] if error else [],
        timing=[StepTiming(step, 0, 0, 0, 0)],
        grant_arrival_us=step,
    )


def an_ack(retired: int) -> Report:
    return Report(epoch=EPOCH, first_step=9, retired=retired)


def sent(*items: object, clock: float = 0.0) -> list[Report]:
    session = Session()
    for item in (*items, Closed()):
        session.outgoing.put(item)  # type: ignore[arg-type]  # what an outbox takes
    return [frame for frame in session.frames(lambda: clock) if isinstance(frame, Report)]


def test_reports_of_one_grant_are_joined() -> None:
    first, flushed = sent(a_report(1, 5), Flush(), a_report(2, 6, 7), a_report(3, 8))
    assert (first.first_step, first.token.tolist()) == (1, [5])
    assert flushed.first_step == 2 and flushed.steps == 2
    assert flushed.step_rows.tolist() == [2, 1] and flushed.token.tolist() == [6, 7, 8]


def test_a_merge_keeps_all_columns() -> None:
    merged = merge_reports([a_report(1, 5, error=True, prefill=True), an_ack(1), a_report(2, 6, 7, prefill=True)])
    assert merged.first_step == 1 and merged.step_applied.tolist() == [1, 1]
    assert merged.slot.tolist() == [0, 0, 1] and merged.count.tolist() == [1, 1, 1]
    assert merged.prefill_slot.tolist() == [1, 2] and merged.moved_id.tolist() == [1, 2]
    assert merged.step_prefill_tokens.tolist() == [1, 2] and [t.wait for t in merged.timing] == [1, 2]
    assert merged.running == 2 and merged.stalled_slot.tolist() == [2] and merged.grant_arrival_us == 2
    assert [slot for slot, _ in merged.error] == [1]
    assert merged.logprobs is not None
    assert merged.logprobs.token_index.tolist() == [0, 1, 2] and merged.logprobs.top_id.tolist() == [5, 6, 7]


def test_first_step_of_a_merge_is_its_first_real_step() -> None:
    assert merge_reports([an_ack(1), a_report(4, 5)]).first_step == 4
    assert merge_reports([an_ack(1), an_ack(1)]).first_step == 9


def test_reports_of_several_grants_are_joined_and_every_step_names_its_own() -> None:
    (report,) = sent(a_report(1, 5), a_report(2, 6, retired=2), an_ack(3))
    assert report.step_applied.tolist() == [1, 2] and report.token.tolist() == [5, 6] and report.retired == 3


def test_progress_of_prefill_is_joined_only_with_steps_of_its_grant() -> None:
    first = (a_report(1, 5, prefill=True), a_report(2, 6))
    second = (a_report(3, 7, retired=2), a_report(4, 8, retired=2, prefill=True))
    reports = sent(*first, *second, a_report(5, 9, retired=3))
    assert [r.step_applied.tolist() for r in reports] == [[1, 1], [2, 2], [3]]


def test_a_report_with_errors_travels_alone() -> None:
    reports = sent(a_report(1, 5), a_report(2, 6, error=True), a_report(3, 7))
    assert [r.first_step for r in reports] == [1, 2, 3]


def test_reports_of_two_runs_are_never_joined() -> None:
    assert [r.epoch.run for r in sent(an_ack(1), Report(epoch=Epoch(1, 2), retired=1))] == [1, 2]


def test_a_joined_report_is_bounded_in_steps_and_bytes() -> None:
    many = sent(*[a_report(step, 5) for step in range(MAX_REPORTS + 1)])
    assert [r.steps for r in many] == [MAX_REPORTS, 1]
    large = a_report(1, *range(20_000))
    assert size_of(large) < MAX_BYTES < 2 * size_of(large)
    assert [r.steps for r in sent(large, large)] == [1, 1]


def test_what_was_taken_leaves_nothing_behind() -> None:
    bundle = ReportBundle()
    bundle.add(a_report(1, 5, prefill=True))
    bundle.take_report()
    bundle.add(a_report(2, 5, retired=2))
    assert bundle.has_room_for(a_report(3, 5, retired=3)) and bundle.take_report().first_step == 2


def test_silence_is_broken_by_heartbeats_that_repeat_the_last_acknowledgement() -> None:
    session, now = Session(), [0.0]
    frames = session.frames(lambda: now[0])
    session.outgoing.put(WorkerHello(EPOCH, 10, 4, (64,), counting_info()))
    next(frames)
    now[0] += HEARTBEAT_S
    first = next(frames)
    assert isinstance(first, Report) and (first.heartbeat, first.epoch, first.retired) == (True, EPOCH, 0)
    last = a_report(7, 5, retired=3, prefill=True)
    last.in_flight, last.draining = 2, True
    session.outgoing.put(last)
    session.outgoing.put(Flush())
    assert next(frames) is last
    now[0] += HEARTBEAT_S
    beat = next(frames)
    assert isinstance(beat, Report) and beat.heartbeat and beat.draining
    assert (beat.retired, beat.in_flight, beat.first_step, beat.running, beat.steps) == (3, 2, 8, 7, 0)
    assert not len(beat.moved_id) and not len(beat.prefill_slot) and not beat.error and not beat.timing
    session.outgoing.put(a_report(8, 6))
    session.outgoing.put(Flush())
    assert next(frames).first_step == 8  # type: ignore[union-attr]  # a report


def test_nothing_is_said_before_the_hello() -> None:
    session, now = Session(), [0.0]
    session.outgoing.put(Flush())
    now[0] = 100 * HEARTBEAT_S
    session.outgoing.put(Closed())
    assert list(session.frames(lambda: now[0])) == []


def test_a_reader_waits_while_many_grants_are_not_applied_and_not_for_a_session_that_is_over() -> None:
    session = Session()
    assert all(session.wait_for_room() for _ in range(MAX_GRANTS_WAITING))
    waited = threading.Thread(target=session.wait_for_room)
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    session.applied()
    waited.join(30)
    assert not waited.is_alive()
    session.close(None)
    assert not session.wait_for_room()


def test_a_report_is_held_a_millisecond_at_most() -> None:
    session, now = Session(), [0.0]
    frames = session.frames(lambda: now[0])
    session.outgoing.put(a_report(1, 5))
    session.outgoing.put(Flush())
    assert next(frames).first_step == 1  # type: ignore[union-attr]  # a report
    session.outgoing.put(a_report(2, 5))
    now[0] = 0.002  # the interval is over: what is there goes out without waiting for more
    assert next(frames).first_step == 2  # type: ignore[union-attr]  # a report


def test_what_was_held_goes_out_before_the_end_and_the_error_after() -> None:
    session = Session()
    session.outgoing.put(a_report(1, 5))
    session.outgoing.put(Closed(Aborted("REASON", "m", "f")))
    frames = session.frames()
    assert next(frames).first_step == 1  # type: ignore[union-attr]  # a report
    with pytest.raises(Aborted, match="REASON"):
        next(frames)
