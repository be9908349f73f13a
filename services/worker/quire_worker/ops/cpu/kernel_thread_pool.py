"""A thread pool whose helper threads join a job within microseconds, as a linear layer of a single row needs.

The caller offers a job through shared memory, without the GIL. The caller and the helpers take chunks of items until
none is left. So a helper that loses its core delays only one chunk. A helper spins for a while after each job, then
sleeps. So helpers stay awake during a step, and sleep between steps that are far apart. The caller wakes helpers that
sleep, but does not wait for a helper that has not begun. The pool does not know what a kernel computes.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from quire_worker.arrays import Int64
from quire_worker.ops.cpu.job import (
    ARGUMENTS,
    CHUNK_MULTIPLE,
    COST_NS,
    FUNCTION,
    JOB_WORDS,
    MAX_THREADS,
    NUM_ITEMS,
    call_job_kernel,
    untyped_intrinsic,
)
from quire_worker.ops.cpu.simd import kernel

_SPIN_NS: Final = 300_000
"""Time that a helper spins, waiting for an offer, before it goes to sleep."""
_MIN_WAIT_NS: Final = 100_000
"""Time that the caller spins for its helpers, unless a quarter of the job's cost is longer. A helper that takes longer
is late: other threads probably use its core."""
_CALIBRATION_SPINS: Final = 10_000
_CALIBRATION_RUNS: Final = 5
"""The pool keeps the fastest run, because the thread may lose its core during a run."""
_POLL_S: Final = 0.0001
_MIN_BACKOFF_S: Final = 0.005
_MAX_BACKOFF_S: Final = 0.5
_BACKOFF_DECAY: Final = 0.98
"""Each run of jobs in which all helpers are in time multiplies the next back-off by this."""
_CHUNKS_PER_THREAD: Final = 4
_MIN_CHUNK_NS: Final = 20_000
"""A job is cut into _CHUNKS_PER_THREAD chunks for each thread, or into fewer if a chunk would cost less than this."""
_JOBS_PER_WAKE: Final = 32
"""After this many jobs the caller wakes the helpers that fell asleep."""
# Indices in the shared memory of int64: the present job, then the state of each helper in a cache line of its own.
# `_NEXT`, the first item that no thread has taken, also has a cache line of its own, because all threads write it.
_FUNCTION, _ARGUMENTS, _NUM_ITEMS, _CHUNK, _NEXT, _FIRST_STATE, _STATE_STRIDE = 0, 1, 2, 3, 8, 16, 8
_IDLE, _OFFERED, _RUNNING, _ASLEEP, _OFFERED_ASLEEP = 0, 1, 2, 3, 4
"""States of a helper. The caller sets OFFERED, or OFFERED_ASLEEP if the helper sleeps. The helper sets RUNNING, then
IDLE, in which it spins, then ASLEEP. The caller may withdraw an offer until the helper runs."""
_MAX_HELPERS: Final = 255
_INT64: Final = ir.IntType(64)


def _element_pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """Emit the pointer to one element, without a bounds check. `values` are a flat int64 array and an index."""
    field = context.data_model_manager[signature.args[0]].get_field_position("data")
    index = context.cast(builder, values[1], signature.args[1], types.intp)
    return builder.gep(builder.extract_value(values[0], field), [index])


def _define_load_acquire(_context: Any, array: Any, index: Any) -> Any:
    """Define the intrinsic `_load_acquire` (array, index): load an int64 with acquire order. The thread then also sees
    what the storing thread had written before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_element_pointer(context, builder, signature, values), "acquire", 8)

    return types.int64(array, index), generate


_load_acquire: Callable[[Int64, int], int] = untyped_intrinsic(_define_load_acquire)


def _define_store_release(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Define the intrinsic `_store_release` (array, index, value): store an int64 with release order, for other threads
    to load."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Emit the atomic store of the value, cast to int64."""
        word = context.cast(builder, values[2], signature.args[2], types.int64)
        builder.store_atomic(word, _element_pointer(context, builder, signature, values), "release", 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


_store_release: Callable[[Int64, int, int], None] = untyped_intrinsic(_define_store_release)


def _define_fetch_add(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Define the intrinsic `_fetch_add` (array, index, value): add atomically with relaxed order, and return the former
    value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = context.cast(builder, values[2], signature.args[2], types.int64)
        return builder.atomic_rmw("add", _element_pointer(context, builder, signature, values), word, "monotonic")

    return types.int64(array, index, value), generate


_fetch_add: Callable[[Int64, int, int], int] = untyped_intrinsic(_define_fetch_add)


def _define_compare_exchange(_context: Any, array: Any, index: Any, old: Any, new: Any) -> Any:
    """Define the intrinsic `_compare_exchange` (array, index, old, new): replace `old` by `new` atomically. Return
    whether `old` was there."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Emit the LLVM cmpxchg on the array's element, and return whether it replaced the old value."""
        words = [context.cast(builder, values[n], signature.args[n], types.int64) for n in (2, 3)]
        pointer = _element_pointer(context, builder, signature, values)
        return builder.extract_value(builder.cmpxchg(pointer, *words, "acq_rel", "acquire"), 1)

    return types.boolean(array, index, old, new), generate


_compare_exchange: Callable[[Int64, int, int, int], bool] = untyped_intrinsic(_define_compare_exchange)


def _define_cpu_relax(_context: Any) -> Any:
    """Define the intrinsic `_cpu_relax`: x86 PAUSE, which tells the core that this thread spins, so that the other
    hyperthread runs. It does nothing on other machines."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Emit x86's PAUSE; on other machines, nothing."""
        if platform.machine() == "x86_64":
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


_cpu_relax: Callable[[], None] = untyped_intrinsic(_define_cpu_relax)


@kernel
def _run_helper(shared: Int64, state_at: int, spins: int) -> None:
    """Run the chunks of jobs that a helper is offered, and spin between them. Return, with the helper's state set to
    asleep, after `spins` spins without an offer. `state_at` is the index of its state."""
    _compare_exchange(shared, state_at, _ASLEEP, _IDLE)
    spins_left = spins
    while spins_left or not _compare_exchange(shared, state_at, _IDLE, _ASLEEP):
        if _compare_exchange(shared, state_at, _OFFERED, _RUNNING) or _compare_exchange(
            shared, state_at, _OFFERED_ASLEEP, _RUNNING
        ):
            _run_chunks(shared)
            _store_release(shared, state_at, _IDLE)
            spins_left = spins
            continue
        _compare_exchange(shared, state_at, _ASLEEP, _IDLE)  # the caller withdrew the offer that woke this helper
        while spins_left and _load_acquire(shared, state_at) == _IDLE:
            _cpu_relax()
            spins_left -= 1


@kernel
def _run_chunks(shared: Int64) -> None:
    """Take chunks of the present job from the shared counter `_NEXT` and compute them, until no chunk is left. The
    caller and all helpers that joined run this."""
    num_items, chunk = shared[_NUM_ITEMS], shared[_CHUNK]
    begin = _fetch_add(shared, _NEXT, chunk)
    while begin < num_items:
        call_job_kernel(shared[_FUNCTION], begin, min(begin + chunk, num_items), shared[_ARGUMENTS])
        begin = _fetch_add(shared, _NEXT, chunk)


@kernel
def _offer(shared: Int64, state_at: int) -> None:
    """Offer the present job to a helper. A helper that falls asleep or wakes at this moment gets no offer."""
    if not _compare_exchange(shared, state_at, _IDLE, _OFFERED):
        _compare_exchange(shared, state_at, _ASLEEP, _OFFERED_ASLEEP)


@kernel
def _run_jobs(
    shared: Int64, jobs: Int64, begin: int, end: int, helpers: int, min_wait_ns: int, spins_per_ns: float
) -> int:
    """Run jobs begin..end, without job `end`, one after the other, described by words as in job.py, with up to
    `helpers` helpers each.

    A job is cut into chunks. A job with one thread or one chunk runs on the calling thread. Otherwise helpers are
    offered the job, the caller computes chunks too, then waits for them. Return `end`. If helpers were late in a job,
    return ~job: all its chunks were taken, but helpers may still compute some.
    """
    for job in range(begin, end):
        at = job * JOB_WORDS
        function, num_items, arguments = jobs[at + FUNCTION], jobs[at + NUM_ITEMS], jobs[at + ARGUMENTS]
        max_threads, cost_ns, multiple = jobs[at + MAX_THREADS], jobs[at + COST_NS], jobs[at + CHUNK_MULTIPLE]
        joining_helpers = min(helpers, max_threads - 1)
        chunks = max_threads * max(1, min(_CHUNKS_PER_THREAD, cost_ns // (max_threads * _MIN_CHUNK_NS)))
        chunk = (num_items + chunks * multiple - 1) // (chunks * multiple) * multiple
        if joining_helpers == 0 or chunk >= num_items:
            call_job_kernel(function, 0, num_items, arguments)
            continue
        shared[_FUNCTION], shared[_ARGUMENTS], shared[_NUM_ITEMS], shared[_CHUNK], shared[_NEXT] = (
            function,
            arguments,
            num_items,
            chunk,
            0,
        )
        for helper in range(joining_helpers):
            at = _FIRST_STATE + helper * _STATE_STRIDE
            _offer(shared, at)
        _run_chunks(shared)
        if not _wait_for_helpers(shared, joining_helpers, int(spins_per_ns * max(min_wait_ns, cost_ns // 4))):
            return ~job
    return end


@kernel
def _wait_for_helpers(shared: Int64, helpers: int, spins_left: int) -> bool:
    """Wait until the first helpers have ended their chunks, and withdraw the offers that they have not taken.

    Return False at once if helpers need more than `spins_left` spins in all; then helpers may still compute, and offers
    may still stand. Return False at the end if a helper that was awake had not begun. Such helpers probably have no
    core.
    """
    all_began = True
    for helper in range(helpers):
        state_at = _FIRST_STATE + helper * _STATE_STRIDE
        if _compare_exchange(shared, state_at, _OFFERED, _IDLE):
            all_began = False
        elif not _compare_exchange(shared, state_at, _OFFERED_ASLEEP, _ASLEEP):
            while _load_acquire(shared, state_at) == _RUNNING:
                _cpu_relax()
                spins_left -= 1
                if spins_left <= 0:
                    return False
    return all_began


@kernel
def _withdraw_offers(shared: Int64, helpers: int) -> int:
    """Withdraw the offers that the first helpers have not taken. Return how many of these helpers still compute."""
    computing = 0
    for helper in range(helpers):
        state_at = _FIRST_STATE + helper * _STATE_STRIDE
        if not _compare_exchange(shared, state_at, _OFFERED, _IDLE) and not _compare_exchange(
            shared, state_at, _OFFERED_ASLEEP, _ASLEEP
        ):
            computing += _load_acquire(shared, state_at) == _RUNNING
    return computing


class KernelThreadPool:
    """The helper threads of a process. One caller at a time uses the helpers. Other callers meanwhile compute alone."""

    def __init__(self) -> None:
        self._shared = np.zeros(_FIRST_STATE + _MAX_HELPERS * _STATE_STRIDE, np.int64)
        self._wake_events: list[threading.Event] = []
        self._caller_lock = threading.Lock()
        # During a back-off callers compute alone, because other threads need the cores.
        self._backoff_until_s = 0.0
        self._backoff_s = _MIN_BACKOFF_S
        self._spins_per_ns = 0.0

    def ensure_helpers(self, num_helpers: int) -> None:
        """Start daemon helper threads until there are `num_helpers`, at most 255. The first call compiles the kernel
        and measures how fast a thread spins. Raises RuntimeError if a thread cannot be started; those before it
        stay."""
        with self._caller_lock:
            if not self._spins_per_ns:
                _run_jobs(
                    self._shared, np.zeros(0, np.int64), 0, 0, 0, 0, 0.0
                )  # compiles the kernel now, instead of in the first step
                self._spins_per_ns = max(_measure_spins_per_ns(self._shared) for _ in range(_CALIBRATION_RUNS))
            for helper in range(len(self._wake_events), min(num_helpers, _MAX_HELPERS)):
                wake = threading.Event()
                thread = threading.Thread(target=self._helper_main, args=(helper, wake), name=f"quire-kernel-{helper}")
                thread.daemon = True
                self._shared[_FIRST_STATE + helper * _STATE_STRIDE] = _ASLEEP
                thread.start()
                self._wake_events.append(wake)

    def run_jobs(self, jobs: Int64) -> None:
        """Run jobs one after the other, and return when all are done. `jobs` holds JOB_WORDS words for each job. A
        caller computes alone while another caller uses the helpers.

        If helpers that were awake begin a job late, or any helper ends it late, other threads use their cores. Threads
        that wait for each other without cores are slower than one thread. So callers then compute alone for a back-off.
        A late job doubles the next back-off, and each batch of up to 32 jobs with helpers in time shortens it by 2 %,
        within 5 ms and 0.5 s.
        """
        num_jobs, done = jobs.size // JOB_WORDS, 0
        while done < num_jobs:
            end = min(done + _JOBS_PER_WAKE, num_jobs)
            threads = int(jobs[done * JOB_WORDS + MAX_THREADS : end * JOB_WORDS : JOB_WORDS].max())
            helpers = min(threads - 1, len(self._wake_events))
            alone = helpers == 0 or time.monotonic() < self._backoff_until_s
            if alone or not self._caller_lock.acquire(blocking=False):
                done = _run_jobs(self._shared, jobs, done, end, 0, 0, 0.0)
                continue
            try:
                self._wake_sleepers(helpers)
                reached = _run_jobs(self._shared, jobs, done, end, helpers, _MIN_WAIT_NS, self._spins_per_ns)
                if reached < 0:
                    self._wait_until_idle()
                    self._backoff_until_s = time.monotonic() + self._backoff_s
                    self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
                else:
                    self._backoff_s = max(_MIN_BACKOFF_S, self._backoff_s * _BACKOFF_DECAY)
                done = reached if reached >= 0 else ~reached + 1
            except BaseException:
                self._wait_until_idle()  # helpers may still use memory that the caller is about to free
                raise
            finally:
                self._caller_lock.release()

    def _wake_sleepers(self, num_helpers: int) -> None:
        """Wake the first helpers if they sleep. They join a job late."""
        for helper in range(num_helpers):
            if self._shared[_FIRST_STATE + helper * _STATE_STRIDE] == _ASLEEP:
                self._wake_events[helper].set()

    def _wait_until_idle(self) -> None:
        """Withdraw the offers that no helper has taken, and sleep until all helpers have ended their chunks, so that
        they can use the caller's core."""
        while _withdraw_offers(self._shared, len(self._wake_events)):
            time.sleep(_POLL_S)

    def _helper_main(self, helper: int, wake: threading.Event) -> None:
        """Run a helper thread for ever: serve offers until the helper has spun for 0.3 ms without one, then wait for
        the wake event."""
        while True:
            _run_helper(self._shared, _FIRST_STATE + helper * _STATE_STRIDE, int(self._spins_per_ns * _SPIN_NS))
            wake.wait()
            wake.clear()


def _measure_spins_per_ns(shared: Int64) -> float:
    """Return how many spins an idle helper makes in a nanosecond."""
    began_ns = time.perf_counter_ns()
    _run_helper(shared, _FIRST_STATE, _CALIBRATION_SPINS)
    return _CALIBRATION_SPINS / (time.perf_counter_ns() - began_ns)


THREAD_POOL: Final = KernelThreadPool()
"""The thread pool of this process."""
