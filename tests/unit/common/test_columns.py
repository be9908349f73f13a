"""Packed columns: their way there and back, what an empty one is, and what is refused."""

import numpy as np
import pytest

from quire_common import columns
from quire_common.columns import equal_lengths, i32, pack_i32
from quire_common.credit import Grant, Report
from quire_common.credit.hello import Epoch
from quire_common.errors import InvalidArgument

EMPTIES = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "u8": np.uint8}


@pytest.mark.parametrize("name", EMPTIES)
def test_an_empty_column_is_an_array_of_its_type_that_nobody_can_write(name: str) -> None:
    """Everybody has the same one."""
    found = getattr(columns, name)(b"")
    assert found.dtype == EMPTIES[name]
    assert len(found) == 0
    assert not found.flags.writeable


def test_columns_that_a_frame_does_not_fill_cannot_be_written() -> None:
    """They are shared by all frames."""
    grant, report = Grant(Epoch(1, 1), 1), Report(Epoch(1, 1))
    assert not grant.stop_slot.flags.writeable
    assert not grant.cancel_move.flags.writeable
    assert not report.token.flags.writeable
    assert not report.finish.flags.writeable


def test_values_come_back() -> None:
    """Empty ones are no bytes."""
    assert i32(pack_i32([1, -2, 3])).tolist() == [1, -2, 3]
    assert pack_i32([]) == b""
    assert pack_i32(np.empty(0, np.int64)) == b""


def test_unequal_lengths_are_told_by_name() -> None:
    """Equal ones, and none at all, have a common length."""
    assert equal_lengths("row", slot=np.zeros(2), count=np.zeros(2)) == 2
    assert equal_lengths("row") == 0
    with pytest.raises(InvalidArgument, match=r"Columns of row differ in length: \{'slot': 1, 'count': 2\}\."):
        equal_lengths("row", slot=np.zeros(1), count=np.zeros(2))
