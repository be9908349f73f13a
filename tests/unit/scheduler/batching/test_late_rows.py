"""Rows that arrive after their slot has changed hands belong to whoever held it at their step."""

from __future__ import annotations

import numpy as np

from quire_common.credit import Finish, Report
from quire_common.errors import Internal
from quire_common.sequence import RequestContext
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.scheduler import Scheduler
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import make_hello


def test_a_late_error_does_not_hit_the_slots_next_holder() -> None:
    """An aborted request's slot is another's by the time its worker says that it had lost its pages."""
    hello = make_hello(max_num_seqs=1)
    core = Scheduler(SchedulerConfig(), hello)
    core.submit(0, 1, RequestContext("first"), a_sequence(4), 1.0)
    first = core.next_grant(1.0)
    assert first is not None
    (start,) = first.start
    core.abort(0, 1, 1.0)
    core.submit(0, 2, RequestContext("second"), a_sequence(4), 1.0)
    second = core.next_grant(1.0)
    assert second is not None and [s.slot for s in second.start] == [start.slot]
    late = Report(
        hello.epoch,
        first_step=1,
        in_flight=1,
        step_applied=np.array([first.seq], np.int64),
        step_rows=np.array([1], np.int32),
        step_prefill_tokens=np.array([0], np.int32),
        slot=np.array([start.slot], np.int32),
        count=np.array([0], np.int32),
        finish=np.array([Finish.ERROR], np.uint8),
        error=[(start.slot, Internal("PAGES_LOST", "lost", "none"))],
    )
    core.on_report(late, 1.0)
    core.check_integrity()
    assert core.stats.pages_lost == 0
    assert core.load().running == 1
    third = core.next_grant(1.0)
    assert third is None or not third.start
