"""Drawing on the device against the reference sampler: the same tokens, ids that may not be drawn, stops, NaN."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import Finish
from quire_worker.sampling.sampler import sample
from tests.kernels.sampling.sampling_rig import ON_GPU, make, on_device, run, without_limits

# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.mark.parametrize("seed", range(8 if ON_GPU else 2))
def test_the_tokens_are_those_of_the_reference(seed: int) -> None:
    rows = 64 if ON_GPU else 10
    logits, columns = make(rows, seed)
    wanted = sample(logits, columns).tolist()
    token, finish, fed = run(logits, on_device(columns))
    assert token == wanted and fed[:rows] == wanted and fed[rows:] == [77] * 4
    assert finish == [0] * rows


def test_without_filters_the_search_may_be_left_out() -> None:
    logits, columns = make(8, 5)
    without_limits(columns)
    assert run(logits, on_device(columns), filtered=False)[0] == sample(logits, columns).tolist()


def test_blocked_ids_are_not_drawn_and_do_not_count() -> None:
    logits, columns = make(12, 3)
    free = sample(logits, columns)
    columns.blocked = {row: np.array([free[row]], np.int32) for row in range(0, 12, 2)}
    wanted = sample(logits, columns).tolist()
    device = on_device(
        columns, blocked=[1 - row % 2 for row in range(12)], stop_id=[[int(free[row]), -1] for row in range(12)]
    )
    token, finish, _ = run(logits, device)
    assert token == wanted
    assert [f == Finish.STOP for f in finish] == [row % 2 == 1 for row in range(12)]


def test_ends_padding_and_rows_that_draw_nothing() -> None:
    logits, columns = make(5, 2)
    columns.params["temperature"][:] = 0.0
    top = logits.argmax(dim=1).tolist()
    device = on_device(
        columns,
        last=[1, 0, 0, 1, 0],
        wanted=[1, 0, 1, 1, 1],
        slot=[3, 2, -1, 1, 0],
        stop_id=[[top[r], 3] for r in range(5)],
    )
    device.stop_id[0] = -1
    token, finish, fed = run(logits, device)
    assert token == [top[0], -1, top[2], top[3], top[4]]
    assert finish == [Finish.LENGTH, Finish.NONE, Finish.STOP, Finish.STOP, Finish.STOP]
    assert fed == [top[4], top[3], 77, top[0], 77, 77, 77, 77, 77]


def test_a_row_with_nan_draws_nothing_and_harms_nobody() -> None:
    logits, columns = make(4, 4)
    wanted = sample(logits, columns).tolist()
    logits[1, 700] = float("nan")
    logits[2, :] = float("-inf")
    token, _, _ = run(logits, on_device(columns))
    assert token == [wanted[0], -1, -1, wanted[3]]
