"""Which pages an error of the worker casts doubt on: a client's mistake none, NaN logits all that were read, a step
that raised only those that it was about to write."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.errors import Internal, InvalidArgument, QuireError
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello

PAGE = 4
SHARED = np.random.default_rng(1).integers(2, 90, 40)
MISTAKE = InvalidArgument("NO_TOKEN_LEFT", "no token is left to draw", "Allow more tokens.")
NAN = Internal("NAN_LOGITS", "nan", "none")
RAISED = [Internal(code, "raised", "none") for code in ("STEP_FAILED", "GPU_OUT_OF_MEMORY", "LOGITS_PROCESSOR_FAILED")]


def a_rig(depth: int = 1) -> Rig:
    return Rig(worker=FakeWorker(make_hello(num_pages=200, page_size=PAGE), depth=depth))


def prompt(seed: int, tail: int = 6) -> np.ndarray:
    """The shared document and a question of its own."""
    return np.concatenate([SHARED, np.random.default_rng(seed).integers(2, 90, tail)])


def prefilled_tokens(rig: Rig, handle: int, seed: int) -> int:
    before = rig.core.stats.prefill_tokens
    rig.submit(handle, a_sequence(prompt(seed), 3))
    rig.run()
    return rig.core.stats.prefill_tokens - before


def fail_one(rig: Rig, handle: int, seed: int, error: QuireError) -> None:
    rig.worker.draw_error = error
    rig.submit(handle, a_sequence(prompt(seed), 3))
    rig.step_until(lambda: (0, handle) in rig.errors)
    rig.worker.draw_error = None
    assert rig.errors[0, handle].code == error.code
    rig.run()


@pytest.mark.parametrize("error", [MISTAKE, *RAISED], ids=lambda error: error.code)
def test_shared_prefix_survives_the_failure_of_one_sharer(error: QuireError) -> None:
    rig = a_rig()
    assert prefilled_tokens(rig, 1, 11) == 46
    fail_one(rig, 2, 12, error)
    assert prefilled_tokens(rig, 3, 13) == 6, "the shared prefix is computed again"


def test_nan_logits_cast_doubt_on_all_pages_that_were_read() -> None:
    rig = a_rig()
    prefilled_tokens(rig, 1, 11)
    fail_one(rig, 2, 12, NAN)
    assert prefilled_tokens(rig, 3, 13) == 46


@pytest.mark.parametrize("error", RAISED, ids=lambda error: error.code)
def test_pages_that_a_raised_step_was_about_to_write_are_not_found(error: QuireError) -> None:
    rig = a_rig()
    fail_one(rig, 1, 11, error)
    assert prefilled_tokens(rig, 2, 12) == 46


@pytest.mark.parametrize("preempted", [True, False], ids=["preempted", "aborted"])
@pytest.mark.parametrize(("error", "computed"), [(NAN, 46), (MISTAKE, 6)], ids=["nan", "mistake"])
def test_late_error_row_drops_suspect_pages_like_a_timely_one(
    preempted: bool, error: QuireError, computed: int
) -> None:
    """The request left its slot while the step with the error ran, so its pages have been given up and named."""
    rig = a_rig(depth=3)
    prefilled_tokens(rig, 1, 11)
    rig.submit(2, a_sequence(prompt(12), 8))
    rig.step_until(lambda: len(rig.tokens[0, 2]) >= 2)
    rig.worker.draw_error = error
    rig.step()
    if preempted:
        rig.core._lifecycle.preempt(rig.core._replica.requests[0, 2], rig.now)
    else:
        rig.core.abort(0, 2, rig.now)
    rig.step()
    rig.worker.draw_error = None
    rig.run()
    assert ((0, 2) in rig.errors) == preempted
    assert prefilled_tokens(rig, 3, 13) == computed
