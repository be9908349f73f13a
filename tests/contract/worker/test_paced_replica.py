"""A real scheduler over a real paced worker, near and far: every answer is the undisturbed one, and nothing is left."""

from __future__ import annotations

import pytest

from bench.scheduler.delay_driver import Measured, measure
from bench.scheduler.delay_stack import DelayStack
from bench.scheduler.delay_workload import PROMPT_LEN, DelayWorkload, pages_needed
from tests.tiers import deep_after

ROWS = 8


@pytest.fixture(scope="module")
def work() -> DelayWorkload:
    return DelayWorkload(seed=3)


def measured(stack: DelayStack, work: DelayWorkload, step_ms: float) -> Measured:
    """Until some request has ended, which takes longer where the machine is busy."""
    for seconds in (1.0, 4.0, 16.0):
        found = measure(stack, work, ROWS, step_ms, ramp_s=0.2, seconds=seconds)
        if found.checked:
            return found
    raise AssertionError("nothing ends")


@pytest.mark.parametrize("lockstep", deep_after(1, [False, True]))
def test_paced_answers_are_right_with_and_without_delay(work: DelayWorkload, lockstep: bool) -> None:
    with DelayStack(1.0, ROWS, lockstep=lockstep) as stack:
        for delay_ms in (0.0, 10.0):
            stack.set_delay(delay_ms)
            found = measured(stack, work, 1.0)
            assert found.decode_tokens > 0
            # A step runs for a millisecond, however fast the rest is.
            assert found.steps <= found.seconds * 1.1e3


def test_paced_answers_are_right_with_few_pages(work: DelayWorkload) -> None:
    with DelayStack(0.5, ROWS, lockstep=False, pages=pages_needed(ROWS)) as stack:
        stack.set_delay(2.0)
        assert measured(stack, work, 0.5).decode_tokens > 0


@pytest.mark.deep
def test_a_wrong_answer_is_found(work: DelayWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "answer", lambda handle: DelayWorkload.answer(work, handle + 1))
    with DelayStack(0.5, ROWS, lockstep=False) as stack, pytest.raises(RuntimeError, match="instead of"):
        measured(stack, work, 0.5)


def test_pages_of_a_running_batch_lie_between_those_of_its_shortest_and_its_longest(work: DelayWorkload) -> None:
    assert ROWS * (PROMPT_LEN // 16) < pages_needed(ROWS) < ROWS * (PROMPT_LEN + 192) / 16
