"""Fewer threads while neighbours need the cores, all of them when nobody does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire_worker.threads.core_meter import CoreMeter
from quire_worker.threads.pace import Pace
from quire_worker.threads.share import Interval, ThreadShare

ALONE = Interval(wanted_cores=1.8, delayed=0.05, idle_cores=0.2)
CROWDED = Interval(wanted_cores=1.0, delayed=0.5, idle_cores=0.0)
FULL = Interval(wanted_cores=1.0, delayed=0.1, idle_cores=0.0)
ROOMY = Interval(wanted_cores=1.0, delayed=0.0, idle_cores=6.0)
WITHOUT_WORK = Interval(wanted_cores=0.1, delayed=0.9, idle_cores=6.0)


def _observe(share: ThreadShare, interval: Interval, times: int, pace: Pace | None = None) -> int:
    for _ in range(times):
        share.observe(interval, pace or Pace())
    return share.threads


def _pace(step_ms: float, rows: int = 16, steps: int = 10) -> Pace:
    pace = Pace()
    for _ in range(steps):
        pace.add(rows, step_ms / 1e3)
    return pace


def _live(share: ThreadShare, interval: Interval, step_ms: dict[int, float], times: int) -> list[int]:
    """The threads of each interval, where a step takes so long with so many threads."""
    seen = []
    for _ in range(times):
        seen.append(share.threads)
        share.observe(interval, _pace(step_ms[share.threads]))
    return seen


def test_alone_it_keeps_all_threads() -> None:
    assert _observe(ThreadShare(2), ALONE, 100) == 2


def test_a_neighbour_halves_them_down_to_one() -> None:
    share = ThreadShare(8)
    assert [_observe(share, CROWDED, 2) for _ in range(4)] == [4, 2, 1, 1]


def test_a_short_disturbance_changes_nothing() -> None:
    share = ThreadShare(2)
    for _ in range(20):
        assert _observe(share, CROWDED, 1) == 2
        assert _observe(share, ALONE, 1) == 2


def test_they_come_back_when_cores_are_idle() -> None:
    share = ThreadShare(6)
    _observe(share, CROWDED, 6)
    assert share.threads == 1
    full = _live(share, FULL, {1: 10.0, 2: 20.0}, 1000)
    assert full.count(1) > 0.98 * len(full)
    share = ThreadShare(6)
    _observe(share, CROWDED, 6)
    assert _observe(share, ROOMY, 9) == 6


def test_attempts_that_fail_become_rare() -> None:
    """A neighbour that leaves cores idle only while this worker has one thread."""
    share, steps, crowded = ThreadShare(2), 10_000, 0
    for _ in range(steps):
        crowded += share.threads == 2
        share.observe(CROWDED if share.threads == 2 else ROOMY, Pace())
    assert crowded < steps * 0.02


def test_intervals_without_work_say_nothing() -> None:
    share = ThreadShare(2)
    assert _observe(share, WITHOUT_WORK, 50) == 2
    _observe(share, CROWDED, 2)
    assert _observe(share, WITHOUT_WORK, 50) == 1


def test_threads_that_are_delayed_and_faster_all_the_same_stay() -> None:
    """A lone worker on two cores: its own scheduler and its clients delay its threads."""
    seen = _live(ThreadShare(2), CROWDED, {2: 7.0, 1: 10.0}, 3000)
    assert seen[:2] == [2, 2] and 1 in seen[2:5], "fewer were tried"
    assert seen[:50].count(1) <= 2
    assert seen.count(1) < 0.01 * len(seen)


def test_one_thread_stays_where_it_is_as_fast() -> None:
    seen = _live(ThreadShare(2), CROWDED, {2: 10.0, 1: 11.0}, 1000)
    assert seen.count(1) > 0.97 * len(seen)


def test_a_neighbour_that_comes_later_is_noticed_at_once() -> None:
    share = ThreadShare(2)
    _live(share, CROWDED, {2: 7.0, 1: 10.0}, 1000)
    assert share.threads == 2
    seen = _live(share, CROWDED, {2: 40.0, 1: 20.0}, 100)
    assert seen[4:20] == [1] * 16 and seen.count(1) >= 90
    assert _live(share, ROOMY, {2: 7.0, 1: 10.0}, 50)[-1] == 2, "and that it has gone"


def test_more_threads_are_tried_though_no_core_is_idle() -> None:
    """A neighbour was there for a moment, and what fills the cores now gives way."""
    share = ThreadShare(2)
    _live(share, CROWDED, {2: 40.0, 1: 20.0}, 10)
    assert share.threads == 1
    assert _live(share, FULL, {2: 7.0, 1: 10.0}, 40)[-1] == 2
    assert _observe(share, CROWDED, 6, Pace()) == 1
    assert set(_live(share, FULL, {2: 9.5, 1: 10.0}, 1000)[100:]) == {1, 2}, "tried, and given back"
    assert share.threads == 1


def test_more_threads_that_bring_nothing_are_given_back() -> None:
    share = ThreadShare(2)
    _live(share, CROWDED, {2: 40.0, 1: 20.0}, 10)
    seen = _live(share, ROOMY, {2: 19.0, 1: 20.0}, 3000)
    assert 2 in seen
    assert seen.count(2) < 0.02 * len(seen)


def test_only_steps_of_one_size_are_compared() -> None:
    assert _pace(20.0, rows=512).times_of(_pace(5.0, rows=16)) is None
    assert _pace(20.0, steps=1).times_of(_pace(5.0)) is None
    mixed = _pace(20.0, rows=512) + _pace(10.0, rows=16)
    assert mixed.times_of(_pace(5.0, rows=10)) == pytest.approx(2.0)
    assert (_pace(1.0) + _pace(3.0)).times_of(_pace(1.0)) == pytest.approx(2.0)


_IDLE_S = len(os.sched_getaffinity(0)) * 10 / os.sysconf("SC_CLK_TCK")


def _proc(root: Path, idle_ticks: int, threads: dict[str, str]) -> Path:
    (root / "stat").write_text(
        "cpu  1 2 3 4\n" + "".join(f"cpu{n} 1 0 0 {idle_ticks} 0 0 0\n" for n in sorted(os.sched_getaffinity(0)))
    )
    for thread, text in threads.items():
        (root / "self" / "task" / thread).mkdir(parents=True, exist_ok=True)
        (root / "self" / "task" / thread / "schedstat").write_text(text)
    return root


def test_the_meter_counts_delay_of_threads_and_idle_time_of_cores(tmp_path: Path) -> None:
    """A thread that hardly gets a core wants one all the same."""
    meter = CoreMeter(_proc(tmp_path, 0, {"1": "1000 0 1", "2": "5000 500 1"}))
    assert meter.works
    _proc(tmp_path, 10, {"1": "301000 100000 2", "2": "305000 300500 2", "3": "900000 900000 1"})
    found = meter.measure_interval()
    assert found.delayed == pytest.approx(0.4)
    assert found.idle_cores > 0
    assert found.wanted_cores == pytest.approx(found.idle_cores / _IDLE_S * 1e-3)
    assert meter.measure_interval() == Interval(0.0, 0.0, 0.0)


def test_a_kernel_without_these_counters(tmp_path: Path) -> None:
    assert not CoreMeter(tmp_path).works


def test_the_meter_of_this_process() -> None:
    meter = CoreMeter()
    if not meter.works:
        pytest.skip("this kernel does not count what threads wait for a core")
    found = meter.measure_interval()
    assert 0.0 <= found.delayed <= 1.0
