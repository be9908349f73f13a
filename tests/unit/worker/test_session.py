"""What the writer sends: Reports joined where they follow closely, never across a Grant, never late."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import Epoch, Finish, Logprobs, Report, StepTiming
from quire_common.errors import Aborted
from quire_worker.engine.report_draft import can_merge, merge_reports
from quire_worker.engine.session import Closed, Flush, Session
from tests.fakes.engine_bench import ids

EPOCH = Epoch(1, 1)


def a_report(step: int, *tokens: int, retired: int = 1, error: bool = False) -> Report:
    n = len(tokens)
    logprobs = Logprobs(
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
        prefill_slot=ids(step),
        prefill_position=ids(step),
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
        session.outbox.put(item)  # type: ignore[arg-type]  # what an outbox takes
    return [frame for frame in session.frames(lambda: clock) if isinstance(frame, Report)]


def test_reports_of_one_grant_are_joined() -> None:
    first, flushed = sent(a_report(1, 5), Flush(), a_report(2, 6, 7), a_report(3, 8))
    assert (first.first_step, first.token.tolist()) == (1, [5])
    assert flushed.first_step == 2 and flushed.steps == 2
    assert flushed.step_rows.tolist() == [2, 1] and flushed.token.tolist() == [6, 7, 8]


def test_a_merge_keeps_all_columns() -> None:
    merged = merge_reports([a_report(1, 5, error=True), an_ack(1), a_report(2, 6, 7)])
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


def test_reports_are_never_joined_across_a_grant_or_a_run() -> None:
    assert [r.retired for r in sent(a_report(1, 5), a_report(2, 5, retired=2), an_ack(2), an_ack(3))] == [1, 2, 3]
    assert not can_merge(an_ack(1), Report(epoch=Epoch(1, 2), retired=1))


def test_a_report_is_held_a_millisecond_at_most() -> None:
    session, now = Session(), [0.0]
    frames = session.frames(lambda: now[0])
    session.outbox.put(a_report(1, 5))
    session.outbox.put(Flush())
    assert next(frames).first_step == 1  # type: ignore[union-attr]  # a report
    session.outbox.put(a_report(2, 5))
    now[0] = 0.002  # the interval is over: what is there goes out without waiting for more
    assert next(frames).first_step == 2  # type: ignore[union-attr]  # a report


def test_what_was_held_goes_out_before_the_end_and_the_error_after() -> None:
    session = Session()
    session.outbox.put(a_report(1, 5))
    session.outbox.put(Closed(Aborted("REASON", "m", "f")))
    frames = session.frames()
    assert next(frames).first_step == 1  # type: ignore[union-attr]  # a report
    with pytest.raises(Aborted, match="REASON"):
        next(frames)
