"""A step's row brings no token, one or several: sessions hear just these, in order, and nothing of a held row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import Finish, Grant, Report
from quire_common.finish import FinishReason
from quire_common.sequence import RequestContext
from quire_scheduler.batching.credit import Credit
from quire_scheduler.batching.lockstep import Lockstep
from quire_scheduler.batching.run_ahead import MARGIN
from quire_scheduler.batching.token_matrix import TokenMatrix
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.outputs import SessionOutputs
from quire_scheduler.core.scheduler import Scheduler
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import make_hello

ROWS = 4
HELLO = replace(make_hello(max_num_seqs=ROWS, num_pages=400, page_size=16, max_model_len=500), max_row_tokens=4)


def started(width: int = 256) -> tuple[Scheduler, Grant, list[int]]:
    """A core whose sequences all run, its first Grant, and their slots by handle."""
    core = Scheduler(SchedulerConfig(), HELLO)
    core._replica.slots.tokens = TokenMatrix(HELLO.num_slots, width)
    for handle in range(ROWS):
        core.submit(0, handle, RequestContext("r"), a_sequence(5 + handle, 400), 1.0)
    grant = core.next_grant(1.0)
    assert grant is not None and len(grant.start) == ROWS
    return core, grant, [start.slot for start in grant.start]


def report(seq: int, first_step: int, steps: list[list[tuple[int, list[int], Finish]]]) -> Report:
    """A Report of these steps of (slot, tokens, finish)."""
    rows = [row for step in steps for row in step]
    return Report(
        HELLO.epoch,
        first_step=first_step,
        retired=seq,
        step_applied=np.full(len(steps), seq, np.int64),
        step_rows=np.array([len(step) for step in steps], np.int32),
        step_prefill_tokens=np.zeros(len(steps), np.int32),
        slot=np.array([slot for slot, _, _ in rows], np.int32),
        count=np.array([len(tokens) for _, tokens, _ in rows], np.int32),
        token=np.array([token for _, tokens, _ in rows for token in tokens], np.int32),
        finish=np.array([finish for _, _, finish in rows], np.uint8),
    )


def heard(outputs: list[SessionOutputs]) -> list[tuple[int, list[int], int]]:
    """(handle, tokens, finish) of each row."""
    found = []
    for out in outputs:
        ends = np.cumsum(out.count)
        found += [
            (int(handle), out.token[end - count : end].tolist(), int(finish))
            for handle, count, end, finish in zip(out.handle, out.count, ends, out.finish, strict=True)
        ]
    return found


def test_held_row_is_told_to_nobody() -> None:
    core, grant, slots = started()
    steps = [[(slots[0], [], Finish.NONE), (slots[1], [7, 8, 9], Finish.NONE), (slots[2], [5], Finish.NONE)]]
    assert heard(core.on_report(report(grant.seq, 1, steps), 1.0)) == [(1, [7, 8, 9], 0), (2, [5], 0)]
    core.check_integrity()
    steps = [[(slot, [], Finish.NONE) for slot in slots]]
    assert core.on_report(report(grant.seq, 2, steps), 1.0) == [], "nor is a step of which all rows were held"


def test_sequence_whose_first_row_was_held_gets_its_first_token_later() -> None:
    core, grant, slots = started()
    core.on_report(report(grant.seq, 1, [[(slots[0], [], Finish.NONE)]]), 1.0)
    assert core._replica.slots.prefilling[slots[0]]
    core.on_report(report(grant.seq, 2, [[(slots[0], [4, 5], Finish.NONE)]]), 1.0)
    assert not core._replica.slots.prefilling[slots[0]]
    assert core._replica.slots.known_len[slots[0]] == 5 + 2


def test_stop_token_is_the_last_of_its_row() -> None:
    core, grant, slots = started()
    outputs = core.on_report(report(grant.seq, 1, [[(slots[0], [7, 8, 1], Finish.STOP)]]), 1.0)
    assert heard(outputs) == [(0, [7, 8, 1], FinishReason.STOP)]
    (note,) = outputs[0].finished
    assert (note.completion_tokens, note.stop_token_id) == (3, 1)
    core.check_integrity()


tokens = st.lists(st.integers(0, 96), max_size=4)


@given(
    reports=st.lists(st.lists(st.lists(tokens, min_size=ROWS, max_size=ROWS), min_size=1, max_size=3), max_size=6),
    width=st.sampled_from([1, 2, 5, 256]),
)
def test_each_request_gets_the_tokens_of_its_rows_in_order(reports: list[list[list[list[int]]]], width: int) -> None:
    core, grant, slots = started(width)
    wanted: list[list[int]] = [[] for _ in slots]
    told: list[list[int]] = [[] for _ in slots]
    step = 1
    for each in reports:
        steps = [[(slots[h], row[h], Finish.NONE) for h in range(ROWS)] for row in each]
        for handle, drawn, _ in heard(core.on_report(report(grant.seq, step, steps), 1.0)):
            assert drawn, "a row without tokens says nothing"
            told[handle] += drawn
        for row in each:
            for handle in range(ROWS):
                wanted[handle] += row[handle]
        step += len(each)
        core.check_integrity()
    assert told == wanted
    for handle, slot in enumerate(slots):
        core._replica.slots.settle_output(slot)
        assert core._replica.slots.held(slot).output.tolist() == wanted[handle]


def test_rows_of_former_holders_keep_their_tokens_whatever_the_counts() -> None:
    core, grant, slots = started()
    core.abort(0, 0, 1.0)
    core.submit(0, 9, RequestContext("r"), a_sequence(6, 40), 1.0)
    second = core.next_grant(1.0)
    assert second is not None and [start.slot for start in second.start] == [slots[0]]
    late = [[(slots[0], [3, 4], Finish.NONE), (slots[1], [5, 6], Finish.NONE), (slots[2], [], Finish.NONE)]]
    assert (1, [5, 6], 0) in heard(core.on_report(report(grant.seq, 1, late), 1.0))
    assert core.stats.late_tokens == 2
    now = [[(slots[0], [8, 8, 8], Finish.NONE), (slots[1], [7], Finish.NONE)]]
    assert heard(core.on_report(report(second.seq, 2, now), 1.0)) == [(9, [8, 8, 8], 0), (1, [7], 0)]
    core.check_integrity()


def test_credit_is_the_lead_in_steps_times_the_tokens_that_rows_drew_of_late() -> None:
    credit = Credit(SchedulerConfig(), HELLO)
    page, most = HELLO.model.pages.page_size, HELLO.max_row_tokens
    assert credit.lead() == (page + MARGIN) * most + most - 1, (
        "before anything was measured, the most that rows may draw"
    )
    steps = [[(0, [1, 2], Finish.NONE), (1, [], Finish.NONE)]]
    credit.granted(1)
    credit.reported(report(1, 1, steps))
    assert credit.lead() == max((1 + MARGIN) * 2 + most - 1, page)
    assert credit.slack() == 2 * page, "as many steps' worth as if each row drew one"
    plain = Credit(SchedulerConfig(), replace(HELLO, max_row_tokens=1))
    assert plain.lead() == page + MARGIN


@pytest.mark.parametrize("most", [1, 4])
def test_lockstep_gives_credit_for_all_tokens_of_the_next_step(most: int) -> None:
    assert Lockstep(SchedulerConfig(), replace(HELLO, max_row_tokens=most)).lead() == most - 1
