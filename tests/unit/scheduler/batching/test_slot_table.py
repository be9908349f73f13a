"""Whose a token is goes by the Grant that was applied at its step, never by when it is reported."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.sequence import RequestContext, Sequence, Stop
from quire_scheduler.batching.slot_table import SlotTable
from quire_scheduler.core.request import Request


def request(uid: int) -> Request:
    return Request.new(uid, 0, uid, RequestContext(f"r{uid}"), Sequence(np.zeros(4, np.int32), Stop(9)), 0.0)


def test_late_rows_belong_to_the_slots_former_holder() -> None:
    table, first, second = SlotTable(1), request(1), request(2)
    slot = table.take_slot(first, seq=3, ceiling=9, capacity=4)
    table.stop(slot, seq=7)
    assert first.slot == -1
    assert table.take_slot(second, seq=7, ceiling=9, capacity=4) == slot
    assert [table.held_at(slot, applied) for applied in (2, 3, 6, 7, 9)] == [None, first, first, second, second]
    assert table.stopping() == [first]
    assert table.retire(6) == []
    assert table.retire(7) == [first]
    assert table.held_at(slot, 6) is None
    table.check_integrity()


def test_a_slot_that_the_worker_ended_has_no_late_rows() -> None:
    table = SlotTable(2)
    slot = table.take_slot(request(1), seq=1, ceiling=9, capacity=4)
    table.finish(slot)
    assert table.held_at(slot, 1) is None
    assert (table.num_free, table.num_active) == (2, 0)


def test_integrity_notices_a_lost_count() -> None:
    table = SlotTable(2)
    slot = table.take_slot(request(1), seq=1, ceiling=9, capacity=4)
    table.check_integrity()
    table.known_len[slot] += 1
    with pytest.raises(AssertionError, match="lost count"):
        table.check_integrity()


def test_output_is_settled_when_a_slot_is_left_or_its_row_is_full() -> None:
    table, one = SlotTable(2), request(1)
    slot = table.take_slot(one, seq=1, ceiling=4000, capacity=4000)
    for start in range(0, 600, 3):
        table.append_tokens(np.array([slot], np.int32), np.arange(start, start + 3, dtype=np.int32)[:, None])
        table.check_integrity()
    assert 0 < len(one.output) < 600 and table.known_len[slot] == 604
    table.stop(slot, seq=2)
    assert list(one.output) == list(range(600))
