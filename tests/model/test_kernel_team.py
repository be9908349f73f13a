"""A team of helpers: every part is computed once, by whoever is awake, and a caller is never left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire_worker.arrays import Int64
from quire_worker.ops.cpu import kernel_team
from quire_worker.ops.cpu.job import ARGUMENTS, COST_NS, COUNT, THREADS, Job, compile_job
from quire_worker.ops.cpu.kernel_team import KernelTeam


def add_one(begin: int, end: int, words: Any) -> None:
    for at in range(begin, end):
        words[at] += 1


def add_one_slowly(begin: int, end: int, words: Any) -> None:
    for at in range(begin, end):
        mixed = words[at] + 1
        for _ in range(20_000):
            mixed = (mixed ^ (mixed >> 7)) * 6364136223846793005 + 1
        words[at] += 2 if mixed == 0 else 1  # it is not, but the compiler cannot know


@pytest.fixture(scope="module")
def function() -> int:
    return compile_job(add_one, "add_one of tests")


@pytest.fixture
def team() -> KernelTeam:
    made = KernelTeam()
    made.grow(3)
    return made


def run(team: KernelTeam, function: int, counts: Int64, threads: int = 4, cost_ns: int = 1_000_000) -> None:
    job = Job(function, 0)
    job.words[[COUNT, ARGUMENTS, THREADS, COST_NS]] = counts.size, counts.ctypes.data, threads, cost_ns
    team.run(job.words)


def asleep(team: KernelTeam) -> bool:
    states = team._box[kernel_team._BOX_WORDS :: kernel_team._STATE_WORDS][: len(team._wakes)]
    return bool((states == kernel_team._ASLEEP).all())


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1000])
def test_every_part_is_computed_once(team: KernelTeam, function: int, count: int) -> None:
    counts = np.zeros(count, np.int64)
    for turn in range(1, 300):
        run(team, function, counts)
        assert (counts == turn).all()


def test_helpers_that_sleep_are_woken_and_not_waited_for(team: KernelTeam, function: int) -> None:
    counts = np.zeros(64, np.int64)
    for turn in range(1, 6):
        until(lambda: asleep(team))
        run(team, function, counts)
        assert (counts == turn).all()


def test_helpers_without_work_leave_the_cores_to_others(team: KernelTeam, function: int) -> None:
    counts, began_s = np.zeros(64, np.int64), time.process_time()
    for _ in range(20):
        run(team, function, counts)
        time.sleep(0.02)
    assert time.process_time() - began_s < 0.25, "some 0.02 s; helpers that look for work all the time take 0.4 s each"


def test_callers_at_once_get_their_own_results(team: KernelTeam, function: int) -> None:
    results = [np.zeros(97, np.int64) for _ in range(6)]

    def call(counts: Int64) -> None:
        for _ in range(400):
            run(team, function, counts)

    threads = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((counts == 400).all() for counts in results)


def test_helpers_that_end_late_are_left_alone_for_a_while(
    team: KernelTeam, function: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, helped, slow = np.zeros(8, np.int64), list[int](), compile_job(add_one_slowly, "add_one_slowly of tests")
    wake = team._wake

    def noted(helpers: int) -> None:
        helped.append(helpers)
        wake(helpers)

    monkeypatch.setattr(team, "_wake", noted)
    monkeypatch.setattr(kernel_team, "_MIN_WAIT_NS", 0)  # a helper that has not ended at once ends late
    team._pause_s = 30.0
    for _ in range(2_000):
        run(team, slow, counts, cost_ns=0)
        if team._pause_until_s:
            break
    asked, turns = len(helped), int(counts[0])
    assert team._pause_until_s and (counts == turns).all()
    for _ in range(50):
        run(team, function, counts)
    assert len(helped) == asked and (counts == turns + 50).all()


def test_a_helper_that_never_begins_is_not_waited_for(
    team: KernelTeam, function: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offer is taken back, also when another helper is late, so that it cannot join a later job by it."""
    counts, slow = np.zeros(8, np.int64), compile_job(add_one_slowly, "add_one_slowly of tests")
    monkeypatch.setattr(team, "_wake", lambda helpers: None)  # all sleep, and go on sleeping
    monkeypatch.setattr(kernel_team, "_MIN_WAIT_NS", 0)
    until(lambda: asleep(team))
    for turn in range(1, 50):
        run(team, slow if turn % 2 else function, counts, cost_ns=0)
        assert (counts == turn).all() and asleep(team)


@pytest.mark.parametrize("state", ["IDLE", "ASLEEP", "OFFERED", "TAKEN"])
def test_an_offer_reaches_who_can_take_it_and_changes_no_other_state(state: str) -> None:
    """An offer that was stored over ASLEEP made the helper look awake, and nobody woke it again."""
    box = np.array([getattr(kernel_team, f"_{state}")], np.int64)
    kernel_team._offer(box, 0)
    reached = {"IDLE": kernel_team._OFFERED, "ASLEEP": kernel_team._OFFERED_ASLEEP}
    assert box[0] == reached.get(state, getattr(kernel_team, f"_{state}"))


def test_a_helper_that_woke_for_an_offer_that_was_taken_back_sleeps_again(team: KernelTeam) -> None:
    """It looked for work without an end."""
    until(lambda: asleep(team))
    began_s = time.process_time()
    for wake in team._wakes:
        wake.set()
    for _ in range(200):  # as if offers were taken back while the helpers look
        team._box[kernel_team._BOX_WORDS :: kernel_team._STATE_WORDS][: len(team._wakes)] = kernel_team._ASLEEP
        time.sleep(0.0001)
    time.sleep(0.3)
    assert asleep(team) and time.process_time() - began_s < 0.25


def test_helpers_that_no_job_wants_stay_asleep(team: KernelTeam, function: int) -> None:
    until(lambda: asleep(team))
    counts, began_s = np.zeros(64, np.int64), time.process_time()
    for _ in range(200):
        run(team, function, counts, threads=1)
        time.sleep(0.0005)
    assert asleep(team) and time.process_time() - began_s < 0.1 and (counts == 200).all()


def test_a_helper_whose_thread_does_not_start_is_none(function: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    team, counts = KernelTeam(), np.zeros(8, np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            team.grow(2)
    for _ in range(100):
        run(team, function, counts)
    team.grow(2)
    for _ in range(100):
        run(team, function, counts)
    assert (counts == 200).all()
