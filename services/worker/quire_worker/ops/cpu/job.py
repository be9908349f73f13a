"""Jobs: a job is a compiled kernel with its arguments in memory, so that any thread can run a part without the GIL.

A job kernel takes (begin, end, arguments): the range of items to compute, without item `end`, and the address of int64
arguments. An argument is an address, an integer, or the bits of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from quire_worker.arrays import Float32, Int64
from quire_worker.ops.cpu.kernel_cache import open_kernel_cache
from quire_worker.ops.cpu.object_code import compile_object, load_object
from quire_worker.ops.cpu.simd import kernel

JOB_KERNEL_SIGNATURE: Final = types.void(types.int64, types.int64, types.CPointer(types.int64))
"""(begin, end, arguments): compute items begin..end. The results must have the same bits however threads divide the
items."""
_INT64: Final = ir.IntType(64)
FLOAT_BYTES: Final = 4
INT_BYTES: Final = 8
Arguments = Any
"""A pointer to the int64 arguments of a job kernel."""
JobKernel = Callable[[int, int, Arguments], None]


# A job is described by six int64 words: the address of its kernel, the number of its items, the address of its
# arguments, the most threads that may share the job, the time that one thread would take for it (an estimate), and the
# number of which the size of each chunk of items is a multiple (except for the last chunk).
FUNCTION, NUM_ITEMS, ARGUMENTS, MAX_THREADS, COST_NS, CHUNK_MULTIPLE, JOB_WORDS = 0, 1, 2, 3, 4, 5, 6


class Job:
    """A compiled kernel and the memory of its arguments. One thread at a time may start it."""

    def __init__(self, function: int, num_arguments: int, chunk_multiple: int = 1) -> None:
        """`function`: the address that `compile_job_kernel` returned."""
        self.arguments: Int64 = np.zeros(num_arguments, np.int64)
        self.words: Int64 = np.array([function, 0, self.arguments.ctypes.data, 1, 0, chunk_multiple], np.int64)


@cache
def compile_job_kernel(function: JobKernel, name: str) -> int:
    """Return the address of the compiled kernel, which stays valid for the life of the process. A repeated call with
    the same function object and name returns the same address.

    The kernel is loaded from the cache on disk, or compiled and, if possible, stored there. `name` is its name in the
    cache. The name must contain everything on which the function's closure depends. Raises ValueError if another kernel
    has this name, or if compiling one of this name failed before.
    """
    if name in _kernel_names:
        raise ValueError(f"Two kernels are named {name!r}.")
    _kernel_names.add(name)
    symbol = "quire " + name
    code = _kernel_cache().load(name)
    if code is None:
        compiled: Any = numba.cfunc(JOB_KERNEL_SIGNATURE)(function)
        code = compile_object(compiled.inspect_llvm(), compiled.native_name, symbol)
        _kernel_cache().store(name, code)
    return load_object(code, symbol)


_kernel_names: Final[set[str]] = set()
_kernel_cache = cache(open_kernel_cache)


@cache
def float_to_bits(value: float) -> int:
    """Return the bits of a float32, as an argument of a job kernel. The kernel calls `float_from_bits`."""
    return int(np.float32(value).view(np.int32))


def untyped_intrinsic(define: Callable[..., Any]) -> Any:
    """Apply numba's `intrinsic`. numba's stubs do not type the function that kernels call, so the result is Any."""
    return intrinsic(define)


def _define_call_job_kernel(_context: Any, function: Any, begin: Any, end: Any, arguments: Any) -> Any:
    """Define the intrinsic `call_job_kernel` for numba. It calls a function of JOB_KERNEL_SIGNATURE by its address,
    with begin, end and arguments as int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Emit the LLVM call of the function at the address, with the other operands cast to int64."""
        function_type = ir.FunctionType(ir.VoidType(), [_INT64, _INT64, _INT64])
        operands = [context.cast(builder, v, t, types.int64) for v, t in zip(values, signature.args, strict=True)]
        builder.call(builder.inttoptr(operands[0], function_type.as_pointer()), operands[1:])
        return context.get_dummy_value()

    return types.void(function, begin, end, arguments), generate


call_job_kernel: Callable[[int, int, int, int], None] = untyped_intrinsic(_define_call_job_kernel)
"""(function, begin, end, arguments): run items begin..end of a job kernel from within another kernel."""


def _define_float_from_bits(_context: Any, bits: Any) -> Any:
    """Define the intrinsic `float_from_bits` for numba. It reinterprets the low 32 bits of an integer as a float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = builder.trunc(values[0], context.get_value_type(types.int32))
        return builder.bitcast(word, context.get_value_type(types.float32))

    return types.float32(bits), generate


float_from_bits: Callable[[int], np.float32] = untyped_intrinsic(_define_float_from_bits)
"""Return the float32 that `float_to_bits` converted."""


def _define_address_to_pointer(_context: Any, address: Any) -> Any:
    """Define the intrinsic `_address_to_pointer` for numba: it turns an integer address into a void pointer."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_address_to_pointer: Callable[[int], Any] = untyped_intrinsic(_define_address_to_pointer)


@kernel
def array_at(address: int, dtype: Any) -> Any:
    """Return the flat array at an address. Its size is 1, but kernels do not check bounds."""
    return numba.carray(_address_to_pointer(address), 1, dtype)  # type: ignore[attr-defined]  # numba's stubs lack it


@kernel
def floats_at(address: int) -> Float32:
    """Return the flat array of float32 at an address."""
    array: Float32 = array_at(address, np.float32)
    return array


@kernel
def ints_at(address: int) -> Int64:
    """Return the flat array of int64 at an address."""
    array: Int64 = array_at(address, np.int64)
    return array
