"""Threads that join a compiled kernel within microseconds, as a linear layer of a single row needs.

The caller offers a job through shared memory, without the GIL. It and its helpers take chunks of the items until none
is left, so a helper that loses its core delays one chunk alone. A helper spins for a while after each job, then sleeps.
So helpers stay awake through a step, and sleep between steps that are far apart. A caller wakes them, and does not wait
for one that has not begun. The team does not know what a kernel computes.
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
    COUNT,
    FUNCTION,
    JOB_WORDS,
    THREADS,
    call_job,
    untyped_intrinsic,
)
from quire_worker.ops.cpu.simd import kernel

_AWAKE_NS: Final = 300_000
"""How long a helper looks for a next part before it goes to sleep."""
_MIN_WAIT_NS: Final = 100_000
"""The caller spins this long for its helpers, or a quarter of the job's cost if that is longer. A helper that takes
longer counts as late: other threads probably hold its core."""
_MEASURED_LOOKS: Final = 10_000
_MEASUREMENTS: Final = 5
"""The quickest counts: a thread may lose its core within one."""
_NAP_S: Final = 0.0001
_MIN_PAUSE_S: Final = 0.005
_MAX_PAUSE_S: Final = 0.5
_PAUSE_DECAY: Final = 0.98
"""Factor on the pause after each run in which all helpers end in time."""
_CHUNKS: Final = 4
_MIN_CHUNK_NS: Final = 20_000
"""A thread's share of a job comes in so many chunks, unless they would cost less than this."""
_JOBS_AT_ONCE: Final = 32
"""After so many jobs the caller wakes the helpers that went to sleep."""
# The job in hand, then one cache line for each helper's state. `_NEXT`, the first item that no thread has taken, has a
# line of its own, since all threads write it.
_FUNCTION, _ARGUMENTS, _COUNT, _CHUNK, _NEXT, _BOX_WORDS, _STATE_WORDS = 0, 1, 2, 3, 8, 16, 8
_IDLE, _OFFERED, _TAKEN, _ASLEEP, _OFFERED_ASLEEP = 0, 1, 2, 3, 4
"""States of a helper. The caller offers; the helper takes, then becomes idle. The caller may take an offer back."""
_MOST_HELPERS: Final = 255
_INT: Final = ir.IntType(64)


def _address(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """A pointer to one element; `values` are a flat int64 array and an index."""
    place = context.data_model_manager[signature.args[0]].get_field_position("data")
    at = context.cast(builder, values[1], signature.args[1], types.intp)
    return builder.gep(builder.extract_value(values[0], place), [at])


def _define_load(_context: Any, array: Any, at: Any) -> Any:
    """(array, at): what another thread has stored there; what it stored before is visible then, too."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, values), "acquire", 8)

    return types.int64(array, at), generate


_load: Callable[[Int64, int], int] = untyped_intrinsic(_define_load)


def _define_store(_context: Any, array: Any, at: Any, value: Any) -> Any:
    """(array, at, value): for other threads to load."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = context.cast(builder, values[2], signature.args[2], types.int64)
        builder.store_atomic(word, _address(context, builder, signature, values), "release", 8)
        return context.get_dummy_value()

    return types.void(array, at, value), generate


_store: Callable[[Int64, int, int], None] = untyped_intrinsic(_define_store)


def _define_add(_context: Any, array: Any, at: Any, value: Any) -> Any:
    """(array, at, value): add atomically; what was there before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = context.cast(builder, values[2], signature.args[2], types.int64)
        return builder.atomic_rmw("add", _address(context, builder, signature, values), word, "monotonic")

    return types.int64(array, at, value), generate


_add: Callable[[Int64, int, int], int] = untyped_intrinsic(_define_add)


def _define_swap(_context: Any, array: Any, at: Any, old: Any, new: Any) -> Any:
    """(array, at, old, new): store `new` if `old` is there, atomically; whether it was."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = [context.cast(builder, values[n], signature.args[n], types.int64) for n in (2, 3)]
        place = _address(context, builder, signature, values)
        return builder.extract_value(builder.cmpxchg(place, *words, "acq_rel", "acquire"), 1)

    return types.boolean(array, at, old, new), generate


_swap: Callable[[Int64, int, int, int], bool] = untyped_intrinsic(_define_swap)


def _define_pause(_context: Any) -> Any:
    """Tell the core that this thread spins (x86 PAUSE), so that its other hyperthread runs; a no-op elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


_pause: Callable[[], None] = untyped_intrinsic(_define_pause)


@kernel
def _serve(box: Int64, at: int, spins: int) -> None:
    """A helper's work: join the jobs that it is offered, until nothing has come for so many looks."""
    _swap(box, at, _ASLEEP, _IDLE)
    left = spins
    while left or not _swap(box, at, _IDLE, _ASLEEP):
        if _swap(box, at, _OFFERED, _TAKEN) or _swap(box, at, _OFFERED_ASLEEP, _TAKEN):
            _compute(box)
            _store(box, at, _IDLE)
            left = spins
            continue
        _swap(box, at, _ASLEEP, _IDLE)  # the offer that it woke for was taken back
        while left and _load(box, at) == _IDLE:
            _pause()
            left -= 1


@kernel
def _compute(box: Int64) -> None:
    """Take chunks of the job and compute them until none is left."""
    count, chunk = box[_COUNT], box[_CHUNK]
    begin = _add(box, _NEXT, chunk)
    while begin < count:
        call_job(box[_FUNCTION], begin, min(begin + chunk, count), box[_ARGUMENTS])
        begin = _add(box, _NEXT, chunk)


@kernel
def _offer(box: Int64, at: int) -> None:
    """Offer the job to a helper; one that falls asleep or wakes meanwhile goes without."""
    if not _swap(box, at, _IDLE, _OFFERED):
        _swap(box, at, _ASLEEP, _OFFERED_ASLEEP)


@kernel
def _run(box: Int64, jobs: Int64, begin: int, end: int, helpers: int, min_wait_ns: int, looks_per_ns: float) -> int:
    """Run jobs begin..end, words as in job.py, with the first helpers. Returns `end`, or ~job if `_in_time` was false
    after that job."""
    for job in range(begin, end):
        at = job * JOB_WORDS
        function, count, arguments = jobs[at + FUNCTION], jobs[at + COUNT], jobs[at + ARGUMENTS]
        threads, cost_ns, multiple = jobs[at + THREADS], jobs[at + COST_NS], jobs[at + CHUNK_MULTIPLE]
        joining = min(helpers, threads - 1)
        chunks = threads * max(1, min(_CHUNKS, cost_ns // (threads * _MIN_CHUNK_NS)))
        chunk = (count + chunks * multiple - 1) // (chunks * multiple) * multiple
        if joining == 0 or chunk >= count:
            call_job(function, 0, count, arguments)
            continue
        box[_FUNCTION], box[_ARGUMENTS], box[_COUNT], box[_CHUNK], box[_NEXT] = function, arguments, count, chunk, 0
        for helper in range(joining):
            at = _BOX_WORDS + helper * _STATE_WORDS
            _offer(box, at)
        _compute(box)
        if not _in_time(box, joining, int(looks_per_ns * max(min_wait_ns, cost_ns // 4))):
            return ~job
    return end


@kernel
def _in_time(box: Int64, helpers: int, spins: int) -> bool:
    """Wait for the first helpers. False if one does not end its chunk within so many looks, or if one that was awake
    has not even begun: such helpers have no core."""
    all_began = True
    for helper in range(helpers):
        at = _BOX_WORDS + helper * _STATE_WORDS
        if _swap(box, at, _OFFERED, _IDLE):
            all_began = False
        elif not _swap(box, at, _OFFERED_ASLEEP, _ASLEEP):
            while _load(box, at) == _TAKEN:
                _pause()
                spins -= 1
                if spins <= 0:
                    return False
    return all_began


@kernel
def _take_back(box: Int64, helpers: int) -> int:
    """Take back what the first helpers have not begun; how many of them still compute."""
    computing = 0
    for helper in range(helpers):
        at = _BOX_WORDS + helper * _STATE_WORDS
        if not _swap(box, at, _OFFERED, _IDLE) and not _swap(box, at, _OFFERED_ASLEEP, _ASLEEP):
            computing += _load(box, at) == _TAKEN
    return computing


class KernelTeam:
    """The helpers of a process. One caller at a time has them; another that comes meanwhile computes alone."""

    def __init__(self) -> None:
        self._box = np.zeros(_BOX_WORDS + _MOST_HELPERS * _STATE_WORDS, np.int64)
        self._wakes: list[threading.Event] = []
        self._caller = threading.Lock()
        # Callers compute alone until this time, because other threads need the cores.
        self._pause_until_s = 0.0
        self._pause_s = _MIN_PAUSE_S
        self._looks_per_ns = 0.0

    def grow(self, helpers: int) -> None:
        """Have at least so many helpers, at most 255."""
        with self._caller:
            if not self._looks_per_ns:
                _run(self._box, np.zeros(0, np.int64), 0, 0, 0, 0, 0.0)  # compiled now, not within the first step
                self._looks_per_ns = max(_measure_looks(self._box) for _ in range(_MEASUREMENTS))
            for number in range(len(self._wakes), min(helpers, _MOST_HELPERS)):
                wake = threading.Event()
                thread = threading.Thread(target=self._help, args=(number, wake), name=f"quire-kernel-{number}")
                thread.daemon = True
                self._box[_BOX_WORDS + number * _STATE_WORDS] = _ASLEEP
                thread.start()  # raises RuntimeError where the process may have no more threads
                self._wakes.append(wake)

    def run(self, jobs: Int64) -> None:
        """Run jobs one after the other; `jobs` holds JOB_WORDS words of each.

        If helpers begin or end a job late, other threads hold their cores. Callers then compute alone for a pause. A
        late job doubles the next pause; jobs in time shorten it by 2 %. Threads that wait for each other without cores
        are slower than one.
        """
        count, done = jobs.size // JOB_WORDS, 0
        while done < count:
            end = min(done + _JOBS_AT_ONCE, count)
            threads = int(jobs[done * JOB_WORDS + THREADS : end * JOB_WORDS : JOB_WORDS].max())
            helpers = min(threads - 1, len(self._wakes))
            alone = helpers == 0 or time.monotonic() < self._pause_until_s
            if alone or not self._caller.acquire(blocking=False):
                done = _run(self._box, jobs, done, end, 0, 0, 0.0)
                continue
            try:
                self._wake(helpers)
                reached = _run(self._box, jobs, done, end, helpers, _MIN_WAIT_NS, self._looks_per_ns)
                if reached < 0:
                    self._wait()
                    self._pause_until_s = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                else:
                    self._pause_s = max(_MIN_PAUSE_S, self._pause_s * _PAUSE_DECAY)
                done = reached if reached >= 0 else ~reached + 1
            except BaseException:
                self._wait()  # helpers may still compute with memory that the caller is about to free
                raise
            finally:
                self._caller.release()

    def _wake(self, helpers: int) -> None:
        """Wake those of the first helpers that sleep. They join late."""
        for number in range(helpers):
            if self._box[_BOX_WORDS + number * _STATE_WORDS] == _ASLEEP:
                self._wakes[number].set()

    def _wait(self) -> None:
        """Wait until all helpers have ended their chunks, and leave them the core meanwhile."""
        while _take_back(self._box, len(self._wakes)):
            time.sleep(_NAP_S)

    def _help(self, number: int, wake: threading.Event) -> None:
        """The body of a helper's thread."""
        while True:
            _serve(self._box, _BOX_WORDS + number * _STATE_WORDS, int(self._looks_per_ns * _AWAKE_NS))
            wake.wait()
            wake.clear()


def _measure_looks(box: Int64) -> float:
    """Looks of an idle helper in a nanosecond."""
    began_ns = time.perf_counter_ns()
    _serve(box, _BOX_WORDS, _MEASURED_LOOKS)
    return _MEASURED_LOOKS / (time.perf_counter_ns() - began_ns)


TEAM: Final = KernelTeam()
"""The team of this process."""
