"""Threads that start their part of a compiled kernel within microseconds, as a linear layer of a single row needs.

The caller hands out parts through shared memory, without the GIL. A helper spins for a while after each part, then
sleeps. So helpers stay awake through a step, and sleep between steps that are far apart. A caller that finds a helper
asleep wakes it for the next run and goes on without it. The team does not know what a kernel computes.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from quire_worker.arrays import Int64
from quire_worker.ops.simd import kernel

JOB_SIGNATURE: Final = types.void(types.int64, types.int64, types.CPointer(types.int64))
"""(begin, end, arguments): compute items begin..end with the int64 arguments at that address. How the items are split
over threads must change no bit."""
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
# Words of a helper's mailbox; those that the helper writes are in a cache line of their own.
_SEQUENCE, _FUNCTION, _ARGUMENTS, _BEGIN, _END, _DONE, _BOX_WORDS = 0, 1, 2, 3, 4, 8, 16
_MOST_HELPERS: Final = 255
_INT: Final = ir.IntType(64)


def _address(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """A pointer to one element; `values` are a flat int64 array and an index."""
    place = context.data_model_manager[signature.args[0]].get_field_position("data")
    at = context.cast(builder, values[1], signature.args[1], types.intp)
    return builder.gep(builder.extract_value(values[0], place), [at])


def _untyped_intrinsic(define: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, as Any: its stubs do not type the function that kernels call."""
    return intrinsic(define)


def _define_load(_context: Any, array: Any, at: Any) -> Any:
    """(array, at): what another thread has stored there; what it stored before is visible then, too."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, values), "acquire", 8)

    return types.int64(array, at), generate


_load: Callable[[Int64, int], int] = _untyped_intrinsic(_define_load)


def _define_store(_context: Any, array: Any, at: Any, value: Any) -> Any:
    """(array, at, value): for other threads to load."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = context.cast(builder, values[2], signature.args[2], types.int64)
        builder.store_atomic(word, _address(context, builder, signature, values), "release", 8)
        return context.get_dummy_value()

    return types.void(array, at, value), generate


_store: Callable[[Int64, int, int], None] = _untyped_intrinsic(_define_store)


def _define_call(_context: Any, function: Any, begin: Any, end: Any, arguments: Any) -> Any:
    """Call a function of JOB_SIGNATURE by its address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT, _INT, _INT])
        given = [context.cast(builder, v, t, types.int64) for v, t in zip(values, signature.args, strict=True)]
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(function, begin, end, arguments), generate


_call: Callable[[int, int, int, int], None] = _untyped_intrinsic(_define_call)


def _define_pause(_context: Any) -> Any:
    """Tell the core that this thread spins (x86 PAUSE), so that its other hyperthread runs; a no-op elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


_pause: Callable[[], None] = _untyped_intrinsic(_define_pause)


def _define_pointer(_context: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_pointer: Callable[[int], Any] = _untyped_intrinsic(_define_pointer)


@kernel
def array_at(address: int, number: Any) -> Any:
    """The flat array of such numbers at an address, for kernels: they do not look at its size, which is 1."""
    return numba.carray(_pointer(address), 1, number)  # type: ignore[attr-defined]  # numba's stubs lack it


@kernel
def _serve(box: Int64, at: int, spins: int) -> None:
    """A helper's work: compute what comes to its mailbox, until nothing has come for so many looks."""
    done, left = _load(box, at + _DONE), spins
    while left:
        sequence = _load(box, at + _SEQUENCE)
        if sequence == done:
            _pause()
            left -= 1
            continue
        _call(box[at + _FUNCTION], box[at + _BEGIN], box[at + _END], box[at + _ARGUMENTS])
        _store(box, at + _DONE, sequence)
        done, left = sequence, spins


@kernel
def _run(box: Int64, helpers: int, function: int, count: int, arguments: int, spins: int) -> bool:
    """Give each of the first helpers a part of 0..count, compute the rest and wait for them. Returns `_ended`."""
    parts = helpers + 1
    for helper in range(helpers):
        at = helper * _BOX_WORDS
        box[at + _FUNCTION], box[at + _ARGUMENTS] = function, arguments
        box[at + _BEGIN], box[at + _END] = count * helper // parts, count * (helper + 1) // parts
        _store(box, at + _SEQUENCE, box[at + _SEQUENCE] + 1)
    _call(function, count * helpers // parts, count, arguments)
    return _ended(box, helpers, spins)


@kernel
def _ended(box: Int64, helpers: int, spins: int) -> bool:
    """Whether the first helpers have ended within so many looks."""
    for helper in range(helpers):
        at = helper * _BOX_WORDS
        while _load(box, at + _DONE) != box[at + _SEQUENCE]:
            _pause()
            spins -= 1
            if spins <= 0:
                return False
    return True


class KernelTeam:
    """The helpers of a process. One caller at a time has them; another that comes meanwhile computes alone."""

    def __init__(self) -> None:
        self._box = np.zeros(_MOST_HELPERS * _BOX_WORDS, np.int64)
        self._wakes: list[threading.Event] = []
        self._asleep: list[bool] = []
        self._caller = threading.Lock()
        self._in_run = False
        # Until then callers compute alone: others need the cores.
        self._pause_until_s = 0.0
        self._pause_s = _MIN_PAUSE_S
        self._looks_per_ns = 0.0

    def grow(self, helpers: int) -> None:
        """Have at least so many helpers, at most 255."""
        with self._caller:
            if not self._looks_per_ns:
                _run(self._box, 0, compile_job(_nothing), 0, 0, 0)  # compiled now, not within the first step
                self._looks_per_ns = max(_measure_looks(self._box) for _ in range(_MEASUREMENTS))
            for number in range(len(self._wakes), min(helpers, _MOST_HELPERS)):
                wake = threading.Event()
                thread = threading.Thread(target=self._help, args=(number, wake), name=f"quire-kernel-{number}")
                thread.daemon = True
                # Asleep, as whoever asks sees it, until it runs.
                self._asleep.append(True)
                self._wakes.append(wake)
                try:
                    thread.start()
                except RuntimeError:  # the process may have no more threads
                    self._asleep.pop()
                    self._wakes.pop()
                    raise

    def run(self, function: int, count: int, arguments: int, most_threads: int, cost_ns: int) -> None:
        """Run the job at address `function` on items 0..count; its arguments are at address `arguments`. `cost_ns`:
        about what one thread takes for all items.

        If helpers end late, other threads hold their cores. Callers then compute alone for a pause. A late run doubles
        the next pause; a run in time shortens it by 2 %. Threads that wait for each other without cores are slower than
        one.
        """
        alone = most_threads == 1 or time.monotonic() < self._pause_until_s
        if alone or not self._caller.acquire(blocking=False):
            _run(self._box, 0, function, count, arguments, 0)
            return
        try:
            # Set before `_awake` looks: from now on no helper that is awake goes to sleep.
            self._in_run = True
            helpers = self._awake(most_threads - 1)
            looks = int(self._looks_per_ns * max(_MIN_WAIT_NS, cost_ns / 4))
            if _run(self._box, helpers, function, count, arguments, looks):
                self._pause_s = max(_MIN_PAUSE_S, self._pause_s * _PAUSE_DECAY) if helpers else self._pause_s
            else:
                self._wait()
                self._pause_until_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        except BaseException:
            self._wait()  # helpers may still compute with memory that the caller is about to free
            raise
        finally:
            self._in_run = False
            self._caller.release()

    def _awake(self, most: int) -> int:
        """How many of the first helpers are awake, one after the other; the others are woken for the next time."""
        found = 0
        for number in range(min(most, len(self._wakes))):
            if self._asleep[number]:
                self._wakes[number].set()
            elif found == number:
                found += 1
        return found

    def _wait(self) -> None:
        """Until all helpers have ended what they have, without keeping a core from them."""
        while not _ended(self._box, len(self._wakes), 1):
            time.sleep(_NAP_S)

    def _help(self, number: int, wake: threading.Event) -> None:
        """The body of a helper's thread."""
        self._asleep[number] = False
        while True:
            _serve(self._box, number * _BOX_WORDS, int(self._looks_per_ns * _AWAKE_NS))
            # Set before `_in_run` is read: a caller sets that before it looks who is asleep.
            self._asleep[number] = True
            if not self._in_run:
                wake.wait()
                wake.clear()
            self._asleep[number] = False


def _measure_looks(box: Int64) -> float:
    """Looks of an idle helper in a nanosecond."""
    began_ns = time.perf_counter_ns()
    _serve(box, 0, _MEASURED_LOOKS)
    return _MEASURED_LOOKS / (time.perf_counter_ns() - began_ns)


def _nothing(begin: int, end: int, arguments: Any) -> None:
    """A job that computes nothing."""


TEAM: Final = KernelTeam()
"""The team of this process."""


def compile_job(function: Any) -> int:
    """The address of a kernel, (begin, end, arguments), that a team can run. It stays for the life of the process."""
    compiled: Any = numba.cfunc(JOB_SIGNATURE)(function)
    _compiled.append(compiled)
    return int(compiled.address)


_compiled: list[Any] = []
