"""The kernel thread pool computes every item exactly once, and a caller never waits for a helper that sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire_worker.arrays import Int64
from quire_worker.ops.cpu import kernel_thread_pool
from quire_worker.ops.cpu.job import ARGUMENTS, COST_NS, MAX_THREADS, NUM_ITEMS, Job, compile_job_kernel
from quire_worker.ops.cpu.kernel_thread_pool import KernelThreadPool


def add_one(begin: int, end: int, words: Any) -> None:
    for at in range(begin, end):
        words[at] += 1


def add_one_slowly(begin: int, end: int, words: Any) -> None:
    for at in range(begin, end):
        mixed = words[at] + 1
        for _ in range(20_000):
            mixed = (mixed ^ (mixed >> 7)) * 6364136223846793005 + 1
        words[at] += 2 if mixed == 0 else 1  # never 0, but the compiler does not know that


@pytest.fixture(scope="module")
def function() -> int:
    return compile_job_kernel(add_one, "add_one of tests")


@pytest.fixture
def pool() -> KernelThreadPool:
    made = KernelThreadPool()
    made.ensure_helpers(3)
    return made


def run(pool: KernelThreadPool, function: int, counts: Int64, threads: int = 4, cost_ns: int = 1_000_000) -> None:
    job = Job(function, 0)
    job.words[[NUM_ITEMS, ARGUMENTS, MAX_THREADS, COST_NS]] = counts.size, counts.ctypes.data, threads, cost_ns
    pool.run_jobs(job.words)


def asleep(pool: KernelThreadPool) -> bool:
    states = pool._shared[kernel_thread_pool._FIRST_STATE :: kernel_thread_pool._STATE_STRIDE][: len(pool._wake_events)]
    return bool((states == kernel_thread_pool._ASLEEP).all())


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1000])
def test_every_item_is_computed_once(pool: KernelThreadPool, function: int, count: int) -> None:
    counts = np.zeros(count, np.int64)
    for turn in range(1, 300):
        run(pool, function, counts)
        assert (counts == turn).all()


def test_sleeping_helpers_are_woken_without_waiting(pool: KernelThreadPool, function: int) -> None:
    counts = np.zeros(64, np.int64)
    for turn in range(1, 6):
        until(lambda: asleep(pool))
        run(pool, function, counts)
        assert (counts == turn).all()


def test_idle_helpers_use_no_cpu_time(pool: KernelThreadPool, function: int) -> None:
    counts, began_s = np.zeros(64, np.int64), time.process_time()
    for _ in range(20):
        run(pool, function, counts)
        time.sleep(0.02)
    assert time.process_time() - began_s < 0.25, "some 0.02 s; helpers that look for work all the time take 0.4 s each"


def test_concurrent_callers_get_their_own_results(pool: KernelThreadPool, function: int) -> None:
    results = [np.zeros(97, np.int64) for _ in range(6)]

    def call(counts: Int64) -> None:
        for _ in range(400):
            run(pool, function, counts)

    threads = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((counts == 400).all() for counts in results)


def test_late_helpers_start_a_backoff(pool: KernelThreadPool, function: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, helped, slow = (
        np.zeros(8, np.int64),
        list[int](),
        compile_job_kernel(add_one_slowly, "add_one_slowly of tests"),
    )
    wake_sleepers = pool._wake_sleepers

    def noted(helpers: int) -> None:
        helped.append(helpers)
        wake_sleepers(helpers)

    monkeypatch.setattr(pool, "_wake_sleepers", noted)
    monkeypatch.setattr(kernel_thread_pool, "_MIN_WAIT_NS", 0)  # so every helper that has not ended yet is late
    pool._backoff_s = 30.0
    for _ in range(2_000):
        run(pool, slow, counts, cost_ns=0)
        if pool._backoff_until_s:
            break
    asked, turns = len(helped), int(counts[0])
    assert pool._backoff_until_s and (counts == turns).all()
    for _ in range(50):
        run(pool, function, counts)
    assert len(helped) == asked and (counts == turns + 50).all()


def test_a_helper_that_never_begins_is_not_waited_for(
    pool: KernelThreadPool, function: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller withdraws its offer, so that the helper cannot join a later job by an old offer."""
    counts, slow = np.zeros(8, np.int64), compile_job_kernel(add_one_slowly, "add_one_slowly of tests")
    monkeypatch.setattr(pool, "_wake_sleepers", lambda helpers: None)  # all helpers keep sleeping
    monkeypatch.setattr(kernel_thread_pool, "_MIN_WAIT_NS", 0)
    until(lambda: asleep(pool))
    for turn in range(1, 50):
        run(pool, slow if turn % 2 else function, counts, cost_ns=0)
        assert (counts == turn).all() and asleep(pool)


@pytest.mark.parametrize("state", ["IDLE", "ASLEEP", "OFFERED", "RUNNING"])
def test_offer_changes_only_idle_and_asleep_helpers(state: str) -> None:
    """Once, an offer overwrote ASLEEP. The helper then looked awake, so no caller woke it again."""
    shared = np.array([getattr(kernel_thread_pool, f"_{state}")], np.int64)
    kernel_thread_pool._offer(shared, 0)
    reached = {"IDLE": kernel_thread_pool._OFFERED, "ASLEEP": kernel_thread_pool._OFFERED_ASLEEP}
    assert shared[0] == reached.get(state, getattr(kernel_thread_pool, f"_{state}"))


def test_helper_woken_for_a_withdrawn_offer_sleeps_again(pool: KernelThreadPool) -> None:
    """Once, such a helper spun for ever."""
    until(lambda: asleep(pool))
    began_s = time.process_time()
    for wake in pool._wake_events:
        wake.set()
    for _ in range(200):  # as if the caller withdrew offers while the helpers spin
        pool._shared[kernel_thread_pool._FIRST_STATE :: kernel_thread_pool._STATE_STRIDE][: len(pool._wake_events)] = (
            kernel_thread_pool._ASLEEP
        )
        time.sleep(0.0001)
    time.sleep(0.3)
    assert asleep(pool) and time.process_time() - began_s < 0.25


def test_single_thread_jobs_leave_helpers_asleep(pool: KernelThreadPool, function: int) -> None:
    until(lambda: asleep(pool))
    counts, began_s = np.zeros(64, np.int64), time.process_time()
    for _ in range(200):
        run(pool, function, counts, threads=1)
        time.sleep(0.0005)
    assert asleep(pool) and time.process_time() - began_s < 0.1 and (counts == 200).all()


def test_failed_thread_start_adds_no_helper(function: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, counts = KernelThreadPool(), np.zeros(8, np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            pool.ensure_helpers(2)
    for _ in range(100):
        run(pool, function, counts)
    pool.ensure_helpers(2)
    for _ in range(100):
        run(pool, function, counts)
    assert (counts == 200).all()
