"""Jobs: compiled kernels whose arguments lie in memory, so that any thread can run a part of one without the GIL.

A kernel takes (begin, end, arguments): the items to compute, and a list of int64. An argument is an address, a whole
number, or the bits of a float32.
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
"""(begin, end, arguments): compute items begin..end with the int64 arguments at that address. How the items are split
over threads must change no bit."""
_INT64: Final = ir.IntType(64)
FLOAT_BYTES: Final = 4
INT_BYTES: Final = 8
Arguments = Any
"""A pointer to the arguments of a kernel."""
JobKernel = Callable[[int, int, Arguments], None]


# Words of a job, int64 each: the compiled kernel, its items, the address of its arguments, the most threads that may
# share it, about what one thread takes for all items, and what chunks of items are a multiple of (but for the last).
FUNCTION, NUM_ITEMS, ARGUMENTS, MAX_THREADS, COST_NS, CHUNK_MULTIPLE, JOB_WORDS = 0, 1, 2, 3, 4, 5, 6


class Job:
    """A compiled kernel and the memory of its arguments. One thread at a time may run it."""

    def __init__(self, function: int, num_arguments: int, chunk_multiple: int = 1) -> None:
        """`function`: of `compile_job`. `arguments`: their number."""
        self.arguments: Int64 = np.zeros(num_arguments, np.int64)
        self.words: Int64 = np.array([function, 0, self.arguments.ctypes.data, 1, 0, chunk_multiple], np.int64)


@cache
def compile_job_kernel(function: JobKernel, name: str) -> int:
    """The address of the compiled kernel. It stays valid for the life of the process.

    `name` names the kernel in the cache on disk: it tells everything that the function's closure depends on. Raises
    ValueError for a name that another function has.
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
    """A float32 as an argument; `float_of` reads it."""
    return int(np.float32(value).view(np.int32))


def untyped_intrinsic(define: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, as Any: its stubs do not type the function that kernels call."""
    return intrinsic(define)


def _define_call_job_kernel(_context: Any, function: Any, begin: Any, end: Any, arguments: Any) -> Any:
    """Call a function of JOB_SIGNATURE by its address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_INT64, _INT64, _INT64])
        operands = [context.cast(builder, v, t, types.int64) for v, t in zip(values, signature.args, strict=True)]
        builder.call(builder.inttoptr(operands[0], function_type.as_pointer()), operands[1:])
        return context.get_dummy_value()

    return types.void(function, begin, end, arguments), generate


call_job_kernel: Callable[[int, int, int, int], None] = untyped_intrinsic(_define_call_job_kernel)
"""(function, begin, end, arguments): run items begin..end of a compiled kernel, from within another."""


def _define_float_from_bits(_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = builder.trunc(values[0], context.get_value_type(types.int32))
        return builder.bitcast(word, context.get_value_type(types.float32))

    return types.float32(bits), generate


float_from_bits: Callable[[int], np.float32] = untyped_intrinsic(_define_float_from_bits)
"""The float32 of an argument made by `float_bits`."""


def _define_address_to_pointer(_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


_address_to_pointer: Callable[[int], Any] = untyped_intrinsic(_define_address_to_pointer)


@kernel
def array_at(address: int, dtype: Any) -> Any:
    """The flat array of such numbers at an address, for kernels: they do not look at its size, which is 1."""
    return numba.carray(_address_to_pointer(address), 1, dtype)  # type: ignore[attr-defined]  # numba's stubs lack it


@kernel
def floats_at(address: int) -> Float32:
    """The flat array of float32 at an address."""
    array: Float32 = array_at(address, np.float32)
    return array


@kernel
def ints_at(address: int) -> Int64:
    """The flat array of int64 at an address."""
    array: Int64 = array_at(address, np.int64)
    return array
