"""Recompute or swap: by what was measured, on both sides of the break-even."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import Epoch, MoveKind, Report, StepTiming
from quire_scheduler.kv.page_moves import Carried
from quire_scheduler.kv.resume_cost import Lane, ResumeCost

PAGE = 16
PAGE_BYTES = 1_000_000


def steps(*each: tuple[int, int, int]) -> Report:
    """Of (prefill tokens, rows, microseconds)."""
    return Report(
        Epoch(1, 1),
        first_step=1,
        step_applied=np.ones(len(each), np.int64),
        step_rows=np.array([rows for _, rows, _ in each], np.int32),
        step_prefill_tokens=np.array([tokens for tokens, _, _ in each], np.int32),
        timing=[StepTiming(wait=99_999, prepare=0, forward=us, sample=0, copy=0) for _, _, us in each],
    )


def measured(prefill_us: int, *, store_us: int = 1_000, load_us: int = 1_000, lookup_us: int = 0) -> ResumeCost:
    """Microseconds of a page: to prefill, to store, to load."""
    cost = ResumeCost(PAGE, PAGE_BYTES)
    cost.measure_steps(steps((PAGE, 1, prefill_us)))
    if store_us:
        cost.moved(Carried(MoveKind.STORE, PAGE_BYTES, store_us), 10.0)
    if load_us:
        cost.moved(Carried(MoveKind.LOAD, PAGE_BYTES, load_us), 10.0)
    if lookup_us:
        cost.looked_up(lookup_us)
    return cost


@pytest.mark.parametrize(
    ("pages", "unstored", "even_us"), [(10, 0, 1_000), (10, 10, 2_000), (10, 5, 1_500), (1, 1, 2_000)]
)
def test_swap_pays_where_it_is_measured_quicker(pages: int, unstored: int, even_us: int) -> None:
    assert measured(even_us + 10).swap_pays(pages, unstored)
    assert not measured(even_us - 10).swap_pays(pages, unstored)


def test_lookup_time_counts_once_in_a_swap() -> None:
    assert not measured(1_400, lookup_us=1_000).swap_pays(1, 0)
    assert measured(1_400, lookup_us=1_000).swap_pays(10, 0)


def test_swap_does_not_pay_without_measurements() -> None:
    assert not ResumeCost(PAGE, PAGE_BYTES).swap_pays(10, 0)
    assert not measured(1_000_000, store_us=0, load_us=0).swap_pays(10, 10)
    assert not measured(1_000_000, store_us=0).swap_pays(10, 10), "nobody knows what stores take"
    assert measured(1_000_000, store_us=0).swap_pays(10, 0)
    assert measured(2_010, load_us=0).swap_pays(10, 10), "loads are taken to be like stores"
    assert not measured(1_990, load_us=0).swap_pays(10, 10)


def test_prefill_cost_excludes_decoders_beside_it() -> None:
    cost = ResumeCost(PAGE, PAGE_BYTES)
    cost.moved(Carried(MoveKind.LOAD, PAGE_BYTES, 1_000), 10.0)
    cost.measure_steps(steps((0, 64, 5_000), (PAGE, 64, 5_900)))
    assert not cost.swap_pays(10, 0), "900 us for a page, not 5900"
    for _ in range(50):
        cost.measure_steps(steps((0, 64, 5_000), (PAGE, 64, 6_100)))
    assert cost.swap_pays(10, 0)


def test_rates_follow_recent_measurements() -> None:
    cost = measured(500)
    assert not cost.swap_pays(10, 0)
    for _ in range(50):
        cost.measure_steps(steps((PAGE, 1, 5_000)))
    assert cost.swap_pays(10, 0)


def test_queued_moves_do_not_count_each_others_time() -> None:
    """Ten moves of 1 ms each that were begun together and reported one by one: the last had waited for nine."""
    cost = measured(1_500, load_us=0)
    for index in range(10):
        cost.moved(Carried(MoveKind.LOAD, PAGE_BYTES, 1_000 * (index + 1)), 20.0 + (index + 1) / 1_000)
    assert cost.swap_pays(10, 0)


def test_reports_without_timings_are_ignored() -> None:
    cost = ResumeCost(PAGE, PAGE_BYTES)
    report = steps((PAGE, 1, 1_000_000))
    report.timing = []
    cost.measure_steps(report)
    cost.moved(Carried(MoveKind.LOAD, PAGE_BYTES, 1), 10.0)
    assert not cost.swap_pays(10, 0)


def test_compute_time_follows_the_prefill_rate() -> None:
    assert ResumeCost(PAGE, PAGE_BYTES).compute_s(10) is None
    assert measured(2_000).compute_s(10) == pytest.approx(0.02)


def test_single_pause_hardly_changes_a_rate() -> None:
    cost = measured(350)
    for _ in range(20):
        cost.measure_steps(steps((PAGE, 1, 350)))
    before = cost.compute_s(100)
    cost.measure_steps(steps((PAGE, 1, 30_000_000)))
    after = cost.compute_s(100)
    assert before is not None
    assert after is not None
    assert after < 1.5 * before, f"{before:.3f} s became {after:.3f} s"


def test_moves_that_failed_do_not_change_a_rate() -> None:
    """A load of no page that failed after 10 s, before the first one that ended well, and after it."""
    lane = Lane()
    lane.add_ended_batch(0, 10_000_000, 10.0)
    lane.add_ended_batch(PAGE_BYTES, 1_000, 20.0)
    lane.add_ended_batch(0, 10_000_000, 40.0)
    assert lane.rate.per_s() == pytest.approx(1_000 * PAGE_BYTES)


def test_slower_worker_is_learnt_within_some_steps() -> None:
    cost = measured(350)
    for _ in range(20):
        cost.measure_steps(steps((PAGE, 1, 35_000)))
    assert cost.compute_s(100) == pytest.approx(3.5, rel=0.3)
