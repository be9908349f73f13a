"""Lead: a distance in steps between what a Grant was made from and the first step under it."""

from __future__ import annotations

import numpy as np

from quire_common.credit import Epoch, Report
from quire_scheduler.batching.run_ahead import MARGIN, MOST_STEPS, RunAhead


def steps(first: int, *applied: int, stalled: bool = False) -> Report:
    report = Report(Epoch(1, 1), first_step=first, step_applied=np.array(applied, np.int64))
    if stalled:
        report.stalled_slot = np.zeros(1, np.int32)
    return report


def test_lead_is_the_largest_recent_distance_plus_margin() -> None:
    lead = RunAhead(at_first=16)
    assert lead.steps == 16 + MARGIN
    lead.sent(1)
    lead.reported(steps(1, 1, 1))
    assert lead.steps == 1 + MARGIN, "step 1 applied what was sent before any step"
    lead.sent(2)
    lead.reported(steps(3, 1, 1, 1))
    lead.reported(steps(6, 1, 2, 2))
    assert lead.steps == 5 + MARGIN, "sent after step 2, applied first by step 7"
    lead.sent(3)
    lead.reported(steps(9, 3))
    assert lead.steps == 5 + MARGIN


def test_grants_applied_together_are_measured_from_their_sending() -> None:
    lead = RunAhead(at_first=16)
    lead.sent(1)
    lead.reported(steps(1, 1, 1))
    lead.sent(2)
    lead.reported(steps(3, 1, 1))
    lead.sent(3)
    lead.reported(steps(5, 1, 3))
    assert lead.steps == 6 - 2 + MARGIN


def test_stall_doubles_the_measured_distance() -> None:
    lead = RunAhead(at_first=16)
    lead.sent(1)
    lead.reported(steps(1, 1))
    lead.sent(2)
    lead.reported(steps(2, *[1] * 9, stalled=True))
    lead.reported(steps(11, 2))
    assert lead.steps == 2 * 10 + MARGIN


def test_lead_forgets_old_distances_and_is_capped() -> None:
    lead, step = RunAhead(at_first=16), 1
    lead.sent(1)
    lead.reported(steps(step, *[0] * 5000, 1))
    step += 5001
    assert lead.steps == MOST_STEPS
    for seq in range(2, 100):
        lead.sent(seq)
        lead.reported(steps(step, seq))
        step += 1
    assert lead.steps == 1 + MARGIN
